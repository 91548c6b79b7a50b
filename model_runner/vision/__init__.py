"""Images: towers, and the rows that they make of tiles, which take the place of embeddings of tokens."""
