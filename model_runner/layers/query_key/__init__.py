"""What queries and keys get between their projections and attention, besides rotary."""
