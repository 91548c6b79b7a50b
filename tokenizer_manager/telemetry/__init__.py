"""What the server tells about itself: metrics, and traces of requests."""
