"""The tokenizer manager process: HTTP, chat templates, tokenization, admission, one open stream per client."""
