"""`engine top`: a live view of a server: who runs, who waits and why, memory, budgets and rates."""
