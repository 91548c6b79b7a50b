"""Checkpoints: the stores that read tensors, the weight formats, and the checks against the model's shapes."""
