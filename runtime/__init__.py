"""What every process shares: messages, configuration, errors, sockets, supervision, logs, metrics. No torch."""
