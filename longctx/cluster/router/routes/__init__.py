"""Routes of the router alone."""
