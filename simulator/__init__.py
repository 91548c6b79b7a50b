"""The scheduler without a model: a virtual clock, a cost model for each step, and as many replicas as are asked for."""
