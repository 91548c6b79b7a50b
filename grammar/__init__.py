"""Grammars that bound what a request may generate: schemas to token masks, and the sandbox that compiles them first."""
