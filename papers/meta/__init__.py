"""Figures of the context parallelism paper."""
