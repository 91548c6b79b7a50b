"""How many tokens a step may hold: limits, caps, partial prefills, and the time target."""
