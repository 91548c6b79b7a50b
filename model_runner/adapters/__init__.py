"""LoRA adapters on the device: their weights in slots beside the base model's, and which tokens of a step use which."""
