"""Requests, outputs, completions and their text."""
