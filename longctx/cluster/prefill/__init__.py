"""Prompts that other servers read for this one, whose pages it fetches while they do."""
