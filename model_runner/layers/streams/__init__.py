"""Additions to layers beside attention and MLPs: inputs of their own (Gemma 3n, Gemma 4), further residual streams."""
