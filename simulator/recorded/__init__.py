"""Recorded runs: a decision log as a workload and as a cost model, simulated with other settings."""
