"""Building blocks of decoder models, shared by all architectures. They compute through `ops` only."""
