"""Which requests are accepted: those that can run at all, and those that the queue has capacity for."""
