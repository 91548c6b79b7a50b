"""GGUF files: header, configuration, tensor names, block types, tokenizer."""
