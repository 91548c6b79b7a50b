"""State layers: the runs of a step over state slots, and the operations in plain torch."""
