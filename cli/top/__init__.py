"""`engine top`: a live view of a server: running and waiting requests, reasons, memory, budgets and rates."""
