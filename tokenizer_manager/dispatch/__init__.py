"""Which replica of the model gets a request, with `--dp`."""
