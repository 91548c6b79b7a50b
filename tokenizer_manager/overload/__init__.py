"""Which requests are accepted now: the limits of the queue, and who waits, or is refused, beyond them."""
