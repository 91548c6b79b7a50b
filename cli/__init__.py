"""The command line: `engine serve`, `engine chat`, `engine bench` and their helpers."""
