"""What the agent APIs share: the history of a chat in the form of templates, and checks of values."""
