"""From the text of an answer to deltas: reasoning, content and tool calls."""
