"""Kernels for GPUs, in Triton. `compile_report` knows all of them; `ops` and the attention backends call them."""
