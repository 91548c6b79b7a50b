"""Many servers of one model on Ray (`engine fleet`): started, healed, scaled, and listed for a router."""
