"""Our own kernels, by where they run. Only `ops` and the attention backends call them."""
