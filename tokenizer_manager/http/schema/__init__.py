"""Request and response bodies as typed structs: parsing, field policy, errors."""
