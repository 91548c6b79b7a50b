"""LoRA adapters on disk: their specs, read from the headers of the files and checked against the base model."""
