"""Replaces "auto" values in a configuration by values that fit host and model, with a reason for each."""
