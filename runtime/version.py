"""The version of this release, read by the package, by messages between machines, and by decision logs."""

__version__ = "0.2.0"
