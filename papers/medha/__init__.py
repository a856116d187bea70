"""Figures of Medha."""
