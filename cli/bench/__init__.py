"""`engine bench`: honest numbers, in process or against any OpenAI-compatible server, and a plain verdict on two runs."""
