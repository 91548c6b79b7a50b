"""The decision log on disk and in shared memory, its replay, and `engine why`."""
