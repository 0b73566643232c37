"""Arrays to bytes and back: the codecs that optimizer states are stored with."""
