"""Prefill/decode disaggregation: the scheduler's side."""
