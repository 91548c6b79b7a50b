"""From the model a user names to local files, architecture facts, tokenizer and raw weights. No torch."""
