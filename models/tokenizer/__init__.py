"""The files beside tokenizer.json in a model folder: special tokens and chat templates."""
