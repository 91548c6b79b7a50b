"""What each child process shares: start-up, control channel, stack dumps and crash reports."""
