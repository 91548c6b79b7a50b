"""Settings that a kind of model (encoders, state layers) or of engine (disaggregated) needs or refuses."""
