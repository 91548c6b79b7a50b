"""Triton kernels for GPUs. `compile_report` lists all of them; `ops` and the attention backends call them."""
