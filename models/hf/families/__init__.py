"""The fields of config.json for one architecture, beyond the common ones: one file per line of models."""
