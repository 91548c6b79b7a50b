"""LoRA adapters in the tokenizer manager: their names, and loading and unloading while the server runs."""
