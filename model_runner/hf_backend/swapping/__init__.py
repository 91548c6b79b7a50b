"""Replaces modules of a loaded transformers model by the engine's kernels, where a test shows that they are equal."""
