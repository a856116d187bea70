"""Decisions about what each step computes: plain Python over plain data, without JAX and without a clock."""
