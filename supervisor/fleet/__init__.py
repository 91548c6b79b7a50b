"""Many servers of one model (`engine fleet`): started here or on Ray, healed, scaled, and listed for a router."""
