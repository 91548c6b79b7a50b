"""A tiny child process for tests of the supervisor; `process.py` says what it can do."""
