"""Metrics of the server, and traces of its requests."""
