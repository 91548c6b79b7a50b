"""Which waiting requests enter a step: `PrefillAdder`, its budgets, and the constraints on a candidate."""
