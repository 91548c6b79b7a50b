"""The radix tree of computed prefixes: matching, leases, eviction, pins, and why a prefix missed."""
