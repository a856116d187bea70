"""Figures of Mnemosyne."""
