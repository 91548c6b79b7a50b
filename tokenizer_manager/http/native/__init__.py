"""APIs of inference engines: `/generate` in the form of SGLang, `/infill` and `/completion` in that of llama-server."""
