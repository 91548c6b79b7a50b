"""Records of a model: what its files say about it, without tensors."""
