"""The device: weights, attention, KV pool, sampler. Executes StepPlans; makes no scheduling decisions."""
