"""Processes that are killed, crash or freeze under load, with real processes."""
