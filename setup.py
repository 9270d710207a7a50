"""The packages, the license, and README.md with absolute links. All else is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

PAGES = "https://github.com/hier-allreduce/hier_allreduce/blob/main/"
PICTURES = "https://raw.githubusercontent.com/hier-allreduce/hier_allreduce/main/"
LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!https?:|mailto:|#)([^)\s]+)\)")


def absolute(text):
    """Return Markdown with absolute links and pictures, since an index has only this one page."""
    return LINK.sub(
        lambda link: f"{link[1]}{link[2]}({PICTURES if link[1] else PAGES}{link[3]})", text
    )


if __name__ == "__main__":
    top = Path(__file__).parent
    readme = (top / "README.md").read_text(encoding="utf-8")
    # configs/ is at the top of the checkout, where people look for it. An installed package has
    # no such top, so that the files go inside it.
    configs = ["hier_allreduce.configs"]
    configs += [
        f"hier_allreduce.configs.{path.name}"
        for path in sorted((top / "configs").iterdir())
        if path.is_dir()
    ]
    setup(
        packages=find_packages(include=["hier_allreduce*"]) + configs,
        package_dir={"hier_allreduce.configs": "configs"},
        license="Apache-2.0",
        long_description=absolute(readme),
        long_description_content_type="text/markdown",
    )
