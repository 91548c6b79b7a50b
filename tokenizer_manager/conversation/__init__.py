"""Chats: messages, tools and reasoning to a prompt and a grammar, and the text of an answer to its parts."""
