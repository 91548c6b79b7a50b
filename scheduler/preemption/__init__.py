"""Retraction and preemption: the choice of victims, and recompute or swap."""
