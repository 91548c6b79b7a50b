"""Markdown to elements and PDF files to text for the chat page, in a process with limits."""
