"""Kernels for the CPU, in C++: compiled on first use by `library`; see `kernels/native.py` for who calls them."""
