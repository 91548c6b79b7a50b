"""What clients ask of embedders and scorers: inputs, parameters, and scores; shared by the endpoints and `LLM`."""
