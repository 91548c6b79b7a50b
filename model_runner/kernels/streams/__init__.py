"""Inputs of layers, sparse gates and the residual streams of AltUp, by provider; see `AltUpOps` in `ops`."""
