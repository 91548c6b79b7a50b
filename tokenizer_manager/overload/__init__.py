"""Overload control: the limits on waiting requests, and what happens to requests beyond them."""
