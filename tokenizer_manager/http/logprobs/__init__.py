"""Log-probabilities in the shapes of both OpenAI APIs, and where their tokens stand in the text."""
