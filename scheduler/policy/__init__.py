"""Scheduling policies: in which order waiting requests are offered to the PrefillAdder. One file per policy."""
