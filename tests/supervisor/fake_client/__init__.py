"""A tokenizer manager without HTTP: asks the real scheduler and detokenizer a few things; see `process.py`."""
