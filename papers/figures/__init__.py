"""Figures of the papers in virtual time, beside the papers' own values: `python -m papers.figures`.

A figure is a function of `Inputs` that returns a `Figure`, listed in `registry`. It loads no JAX.
"""
