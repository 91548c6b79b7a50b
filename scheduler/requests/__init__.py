"""`Req`, its states and queues, stop rules and the rows that answer it."""
