"""Tests of `grammar/schema/`."""
