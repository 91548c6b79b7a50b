"""Drafters: what a runner proposes as the next tokens of its requests."""
