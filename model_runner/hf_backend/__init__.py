"""`--model-impl transformers`: architectures without a module in `models/`."""
