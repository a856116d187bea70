"""Figures of the papers in virtual time, beside the papers' own values: `python -m longctx.simulation.figures`.

A figure is a function of `Inputs` that returns a `Figure`, listed in `registry`. It loads no JAX.
"""
