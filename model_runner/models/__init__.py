"""Architectures, one file per Hugging Face `model_type`, written against `layers`."""
