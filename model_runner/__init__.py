"""The device: weights, attention, KV pool, sampler. Executes StepPlans; decides nothing."""
