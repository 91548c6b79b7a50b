"""Grammars that bound what a request may generate: schemas to token masks, and the process that proves them."""
