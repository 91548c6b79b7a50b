"""The engine inside the caller's process: `LLM`, and its engine thread. No sockets, same components."""
