"""Block-quantized weights: rows of a GGUF file, rounding to blocks, packing, and their matmul on the CPU."""
