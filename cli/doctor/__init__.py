"""`engine doctor`: whether a model will be served here, and if not, what mends it."""
