"""mkdocs' hooks: tables that come from the code, and links to files outside ``docs/``."""

import re
import sys
from pathlib import Path

from mkdocs.exceptions import PluginError

sys.path.insert(0, str(Path(__file__).parent))

import reference

INCLUDE = re.compile(r"<!-- include: ([\w-]+) -->")
FOLDERS = "tests|benchmarks|examples|configs|hier_allreduce"
FIGURE = re.compile(r'(<img [^>]*?src="([^"]+)"[^>]*>)')
OUTSIDE = re.compile(rf"\[([^\]]*)\]\((?:\.\./)+((?:{FOLDERS})/[^)]*|[A-Z]+\.md(?:#[\w-]+)?)\)")


def on_config(config):
    """Leave out the pages of the navigation that are not written yet."""
    for section in config.nav:
        for title, pages in section.items():
            if isinstance(pages, list):
                section[title] = [page for page in pages if _is_written(page, config.docs_dir)]
    return config


def _is_written(page, folder):
    path = next(iter(page.values())) if isinstance(page, dict) else page
    return (Path(folder) / path).exists()


def on_page_markdown(markdown, page, config, files):
    """Insert the generated parts of a page, and link files outside ``docs/`` in the repository."""
    markdown = INCLUDE.sub(lambda match: reference.INCLUDED[match.group(1)](), markdown)
    return OUTSIDE.sub(rf"[\1]({config.extra['repository']}/blob/main/\2)", markdown)


def on_page_content(html, page, config, files):
    """Link each figure to its file."""
    return FIGURE.sub(r'<a class="figure" href="\2">\1</a>', html)


def on_post_page(output, page, config):
    """Refuse a page that loads a script, a style or a picture from another server when it is read."""
    loaded = re.search(r"<(?:script|img|iframe)[^>]+https?:[^>]*>|<link[^>]+stylesheet[^>]+https?:[^>]*>", output)
    if loaded:
        raise PluginError(f"{page.file.src_path}: loads from another server: {loaded.group()}")
    return output
