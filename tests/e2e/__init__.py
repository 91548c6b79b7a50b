"""End to end: the commands as a user runs them, over real processes, with a small random model."""
