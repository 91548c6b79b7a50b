"""KV stores: pages of the prefix cache in files or on a server, and the thread that moves them."""
