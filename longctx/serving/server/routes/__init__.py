"""The server's routes, a module for each kind."""
