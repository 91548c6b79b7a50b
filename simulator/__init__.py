"""The scheduler without a model: a virtual clock, a cost model for each step, and any number of replicas."""
