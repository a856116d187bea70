"""Prompts that other servers compute for this one, whose pages it fetches meanwhile."""
