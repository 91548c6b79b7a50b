"""The radix tree of computed prefixes: matching, leases, eviction, pins, and explanations of cache misses."""
