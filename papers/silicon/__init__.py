"""Simulated engines of others beside their measured runs on H100."""
