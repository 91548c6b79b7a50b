"""Parts that every process shares: messages, configuration, errors, sockets, logs, child processes. No torch."""
