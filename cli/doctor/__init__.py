"""`engine doctor`: whether a model can be served on this machine, and how to fix what prevents it."""
