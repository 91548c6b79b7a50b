"""Pages of all ranks of an engine, on their way to those of another one."""
