"""KV pages and pool rows: who owns which page, the free list, host pages for swapping, the page equation."""
