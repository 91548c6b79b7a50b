"""The keys and the tensors' names of one GGUF architecture: one file per line of models."""
