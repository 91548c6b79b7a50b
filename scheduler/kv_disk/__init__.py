"""KV disk: pages of the prefix cache in files that outlive the process, and the thread that moves them."""
