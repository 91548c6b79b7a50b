"""`/generate`: the API of the engine itself, in the form of SGLang."""
