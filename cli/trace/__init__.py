"""`engine trace`: a decision log as a page to look at, or for Perfetto."""
