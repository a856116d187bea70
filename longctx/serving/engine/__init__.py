"""The engine: its core, and the drivers of that core."""
