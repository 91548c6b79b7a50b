"""Values that describe decisions: verdicts, cache misses, the record of a pass. Imports no other folder here."""
