"""Grammars of running requests: where matchers come from, the masks of a step, and when a grammar ends a request."""
