"""Estimators: how much KV memory is kept for tokens that are not generated yet. One file per rule."""
