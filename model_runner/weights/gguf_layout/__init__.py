"""How tensors lie in GGUF files: blocks of integers, and orders of rows and inputs."""
