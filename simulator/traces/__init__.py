"""Workload files of several published kinds: what a file is, its timed requests, its conversations."""
