"""Tensor parallelism: process groups, the loop of the ranks above 0, and the runner that sends steps to them."""
