"""Models of the hub: names, the cache on the disk, downloads.

The cache has huggingface_hub's layout and place, so that other tools find what the engine downloads, and the reverse.
The transfers are the engine's own: those of huggingface_hub (2.4) start an interrupted file again from zero and do not
verify checksums. huggingface_hub gives the settings: `HF_HOME`, `HF_TOKEN`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`.
"""
