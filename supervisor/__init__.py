"""The `engine serve` process: starts, watches, restarts and stops the other processes, on one machine or several."""
