"""When memory runs out or a more urgent request comes: victims, recompute or swap."""
