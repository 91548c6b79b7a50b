"""Requests of clients to embedders and scorers: inputs, parameters, and scores; shared by the endpoints and `LLM`."""
