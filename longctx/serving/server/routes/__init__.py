"""Routes of the server, by subject."""
