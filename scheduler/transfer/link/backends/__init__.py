"""`--transfer-backend`: what moves pages from a prefill engine to a decode engine."""
