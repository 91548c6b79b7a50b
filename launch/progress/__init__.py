"""What a start shows of its steps, downloads and the compilation of kernels, in terminals, notebooks and logs."""
