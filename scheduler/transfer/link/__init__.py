"""Prefill/decode disaggregation: the connections between the engines, and what moves the pages."""
