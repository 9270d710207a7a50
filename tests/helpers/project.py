"""What setup.cfg says."""

import configparser
from pathlib import Path

TOP = Path(__file__).parents[2]


def setup_cfg(folder=TOP):
    """Return the sections of the setup.cfg in a folder."""
    settings = configparser.ConfigParser()
    settings.read(str(folder / "setup.cfg"), encoding="utf-8")
    return settings
