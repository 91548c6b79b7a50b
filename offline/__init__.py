"""The engine inside the caller's process: `LLM`, and the engine thread behind it. No sockets, same parts."""
