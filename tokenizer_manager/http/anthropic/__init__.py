"""`/v1/messages`: the Messages API of Anthropic."""
