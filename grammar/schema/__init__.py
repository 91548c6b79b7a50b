"""JSON Schemas of clients: which keywords are enforced, what is wrong with a schema, and its shortest document."""
