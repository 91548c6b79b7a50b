"""KV events: notifies routers over ZMQ which blocks the prefix cache holds."""
