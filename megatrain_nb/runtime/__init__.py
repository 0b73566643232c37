"""The only layer with torch: blocks stream, compute and are updated; the model itself stays as it is."""
