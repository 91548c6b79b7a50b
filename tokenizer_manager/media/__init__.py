"""Images of requests: from the parts of a message to tiles in a file, and to tokens in a prompt."""
