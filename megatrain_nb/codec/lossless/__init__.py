"""Floats in fewer bytes, every bit of them kept."""
