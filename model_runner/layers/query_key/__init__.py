"""Steps between the projections of queries and keys and attention, besides rotary."""
