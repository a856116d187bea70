"""One address for many engines: HTTP over the conductor, without weights or devices of its own."""
