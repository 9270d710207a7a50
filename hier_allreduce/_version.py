"""The version of the package, written down here only."""

__version__ = "0.1.0"
