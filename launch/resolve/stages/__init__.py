"""Pipeline stages: how a model's layers are divided, and what each stage takes."""
