"""The endpoints that return vectors and scores instead of text: embeddings, rerank, score."""
