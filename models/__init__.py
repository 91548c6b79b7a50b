"""Model files without torch: families, their two file formats, weights on disk, tokenizers, the hub."""
