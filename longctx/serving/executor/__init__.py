"""Turns batches into the arrays that a step reads, and its results into tokens."""
