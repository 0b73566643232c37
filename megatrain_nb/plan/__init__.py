"""Pure arithmetic: what a model needs, in which order, and where each byte stays."""
