"""Native programs: decodes and forward passes on the CPU as one call."""
