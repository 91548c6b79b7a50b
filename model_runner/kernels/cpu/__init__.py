"""C++ kernels for the CPU: `library` compiles them on first use; `kernels/native.py` and its neighbors call them."""
