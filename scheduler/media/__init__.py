"""Images in the scheduler: their ids in the prefix cache, and the rows of the encoder's buffer."""
