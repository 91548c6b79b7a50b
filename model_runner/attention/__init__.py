"""Attention over the paged KV pool: one protocol and several backends, selected once at start."""
