"""Token ids to printable text: streaming boundaries, UTF-8, stop strings. One process."""
