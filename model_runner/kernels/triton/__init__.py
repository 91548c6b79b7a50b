"""Kernels for GPUs, in Triton. None yet: `ops` uses torch's own."""
