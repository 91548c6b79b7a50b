"""Layers with a state in the place of attention; they have the form of `SelfAttention`."""
