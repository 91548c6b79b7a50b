"""Steps that are recorded once and replayed: CUDA graphs on a GPU, native programs on a CPU."""
