"""`engine batch`: the requests of a file, answered without the files and batches of a server."""
