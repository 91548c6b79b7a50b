"""The text of an answer on a terminal: Markdown, word wrap, and repetition without end."""
