"""State that outlives the server (`--state-dir`): one database and its tables."""
