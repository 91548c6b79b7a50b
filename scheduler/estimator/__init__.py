"""Estimators: how much KV memory is reserved for tokens that are not yet generated. One file per rule."""
