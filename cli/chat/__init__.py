"""`engine chat`: talk to a model in the terminal, in this process or over HTTP."""
