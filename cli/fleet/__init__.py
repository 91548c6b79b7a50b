"""`engine fleet`: servers of one model, started, healed and scaled by one command."""
