"""HTTP: the OpenAI-compatible API, the native one, and what operators ask. `app.py` is the way in."""
