"""Tiers of the prefix cache below the device's memory: what is looked up, loaded and stored."""
