"""Figures of Mooncake."""
