"""`engine trace`: draws a decision log as an HTML page or as a trace for Perfetto."""
