"""Hugging Face folders: `config.json` per model family, rope settings."""
