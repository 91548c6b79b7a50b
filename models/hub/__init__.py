"""Models of the hub: names, the cache on the disk, downloads by huggingface_hub."""
