"""Device and pinned host memory: KV pools, input and output buffers, huge pages, measurements."""
