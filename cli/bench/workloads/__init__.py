"""The requests of a benchmark: data sets, lengths, arrival times."""
