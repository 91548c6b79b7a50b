"""`engine embed` and `engine rerank`: vectors of texts, and documents by their relevance to a query."""
