"""The engine's own kernels, one folder or module per device. Only `ops` and the attention backends call them."""
