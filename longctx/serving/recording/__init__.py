"""Logs of engines: all that decisions followed from, written as it happens, so that it can be replayed."""
