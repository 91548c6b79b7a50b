"""KV pages and pool rows: page ownership, free pages, host pages for swapping, the page equation."""
