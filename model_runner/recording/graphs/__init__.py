"""CUDA graphs of decodes, prompts and mixed steps, and of the sampling after decodes."""
