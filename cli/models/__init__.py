"""`engine pull`, `list`, `rm` and `ps`: the models and servers on this machine."""
