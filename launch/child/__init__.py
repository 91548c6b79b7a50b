"""Parts of each child process: start-up, process limits, control channel, stack dumps and crash reports."""
