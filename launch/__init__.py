"""From settings to running processes: what the settings become, child processes, progress of a start."""
