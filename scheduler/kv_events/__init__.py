"""KV events: tells routers over ZMQ which blocks the prefix cache holds."""
