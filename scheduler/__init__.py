"""Decides what runs next and accounts for every page of KV memory. One process; it contains rank 0's ModelRunner."""
