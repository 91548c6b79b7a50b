"""Tests of `grammar/lowering/`."""
