"""The NVIDIA GPUs that CUDA will show to this engine's processes, found without a CUDA context."""
