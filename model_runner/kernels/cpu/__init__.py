"""Kernels for the CPU, in C++. None yet: `ops` uses torch's own."""
