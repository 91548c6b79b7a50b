"""Values that describe decisions: verdicts, cache misses, pass records. Imports no other folder of the scheduler."""
