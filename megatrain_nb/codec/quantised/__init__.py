"""Moments in 2 to 8 bits: each codec in numpy, and compiled, with the same bytes."""
