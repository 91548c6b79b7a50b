"""The operations of latent attention, by provider; see `PackHeads` and `StoreLatent` in `ops`."""
