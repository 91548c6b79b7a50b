"""Tensor parallelism: process groups, the loop of ranks above 0, the runner that sends steps to them."""
