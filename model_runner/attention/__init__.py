"""Attention over the paged KV pool: one protocol, several backends, chosen once at start."""
