"""One file per family of models: how its files are read, and the structure that computes it."""
