"""Requests: generated ones, and those of files; conversations and arrival times, of which they are made."""
