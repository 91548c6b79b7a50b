"""`--model-impl transformers`: models of architectures without a page in `models/`."""
