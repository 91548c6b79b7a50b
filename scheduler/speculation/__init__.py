"""Draft tokens from n-grams, what drafts cost, and several decode steps per launch."""
