"""Prefill-only requests: hidden states of prompts to vectors, scores, and probabilities of labels."""
