"""From hidden states to sampled tokens: logits, filters, penalties, noise, logprobs and the sampler backends."""
