"""OpenAI's Files and Batches: uploads, and requests that are answered from a file."""
