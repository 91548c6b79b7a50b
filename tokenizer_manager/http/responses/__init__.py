"""`/v1/responses`: the Responses API of OpenAI."""
