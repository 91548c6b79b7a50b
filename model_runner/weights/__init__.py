"""Checkpoints: where tensors come from, and the checks that they are what the model needs."""
