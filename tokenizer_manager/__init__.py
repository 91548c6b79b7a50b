"""The front door: HTTP, chat templates, tokenising, admission, one open stream per client. One process."""
