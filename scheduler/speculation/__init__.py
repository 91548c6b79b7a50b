"""Draft tokens from n-grams, the cost of drafts, and multi-step decodes."""
