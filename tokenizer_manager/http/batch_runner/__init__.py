"""The work on batches: lines are checked, answered by the handlers of HTTP, and written to files."""
