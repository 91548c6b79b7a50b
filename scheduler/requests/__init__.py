"""`Req`, its statuses and queues, the stop rules, and the output rows of a request."""
