"""Decides what runs next and accounts for every page of KV memory. One process, with rank 0's ModelRunner in it."""
