"""Triton kernels for GPUs. `kernel_variant` lists all of them; `ops` and the attention backends call them."""
