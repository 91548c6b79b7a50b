"""Number of tokens in a step: limits, caps, partial prefills, and the time target."""
