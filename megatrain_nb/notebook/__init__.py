"""The only layer that knows Jupyter: magics, and pictures of what the runtime does."""
