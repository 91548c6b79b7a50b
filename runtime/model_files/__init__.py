"""Resolves the model that a user names to local files, architecture facts, tokenizer and raw weights. No torch."""
