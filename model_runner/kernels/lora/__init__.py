"""Products with the low-rank matrices of LoRA adapters: in C++ and in plain torch."""
