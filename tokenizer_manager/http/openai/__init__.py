"""`/v1/chat/completions` and `/v1/completions`: the APIs of OpenAI."""
