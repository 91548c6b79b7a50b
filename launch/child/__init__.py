"""What each child process shares: start-up, process limits, control channel, stack dumps and crash reports."""
