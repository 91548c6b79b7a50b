"""`engine bench`: honest numbers, in process or against any OpenAI-compatible server; a verdict on two runs."""
