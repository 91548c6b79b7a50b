"""`--executor ray`: the ranks of one engine as actors of a Ray cluster."""
