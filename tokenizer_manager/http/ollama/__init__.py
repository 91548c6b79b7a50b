"""`/api/...`: the API of Ollama."""
