"""Token ids to text: streaming boundaries, UTF-8, stop strings. One process."""
