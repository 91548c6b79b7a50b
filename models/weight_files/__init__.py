"""Weight files by their headers: which there are, what they hold, and whether the model needs just that."""
