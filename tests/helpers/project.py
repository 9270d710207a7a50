"""What pyproject.toml says."""

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TOP = Path(__file__).parents[2]


def pyproject():
    """Return the content of pyproject.toml."""
    return tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))
