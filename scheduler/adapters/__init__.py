"""LoRA adapters in the scheduler: which are there, and which of them are in the slots that steps read."""
