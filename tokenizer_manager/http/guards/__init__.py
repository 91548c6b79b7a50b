"""Checks before a handler runs: API keys, hosts, origins, body sizes, request limits."""
