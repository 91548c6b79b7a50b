"""`EngineConfig` and its groups: each setting with type, default, range, help and flag, and where values come from."""
