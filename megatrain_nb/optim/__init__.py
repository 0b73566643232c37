"""AdamW on the host, over flat float32 arrays, with the numbers of torch's own."""
