"""Chat messages to prompt text: the model's chat template in a sandbox."""
