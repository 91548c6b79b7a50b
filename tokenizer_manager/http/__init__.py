"""HTTP: the OpenAI-compatible API, the native API, and the operators' endpoints. `app.py` is the entry point."""
