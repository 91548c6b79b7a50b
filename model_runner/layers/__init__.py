"""Building blocks of decoder models, shared by all architectures. They compute only through `ops`."""
