"""The version of the package, at its only place."""

__version__ = "0.1.0"
