"""The decision log on disk and in shared memory, and its replay."""
