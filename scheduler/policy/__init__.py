"""Scheduling policies: the order in which waiting requests are offered to the `PrefillAdder`."""
