"""`--transfer-backend`: the libraries that write KV pages into the memory of another engine, each used by one rank."""
