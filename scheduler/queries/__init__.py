"""Answers to questions about requests: why one waited or was retracted, the list of live ones, pins."""
