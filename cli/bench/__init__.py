"""`engine bench`: measures throughput and latency, in process or against an OpenAI-compatible server; compares runs."""
