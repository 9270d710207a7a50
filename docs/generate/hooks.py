"""mkdocs' hooks, which complete the pages: links out of ``docs/`` lead into the repository."""

import re

from mkdocs.exceptions import PluginError

FIGURE = re.compile(r'(<img [^>]*?src="([^"]+)"[^>]*>)')
INLINE_CODE = re.compile(r"(?<!<span></span>)<code>[^<]+</code>")  # not that of a block
HYPHENATED = re.compile(r"(?<![^ >])[^ <>]*-[^ <>]{1,24}(?![^ <])")  # such as --minutes, test-tf1
OUTSIDE = re.compile(
    r"\]\((?:\.\./)+("
    r"(?:tests|benchmarks|examples|configs|hier_allreduce)/[^)]*"  # a file in a folder
    r"|[A-Z]+\.md(?:#[\w-]+)?"  # a page at the top, such as CONTRIBUTING.md#rules
    r")\)"
)


def on_page_markdown(markdown, page, config, files):
    """Link files outside ``docs/`` in the repository."""
    return OUTSIDE.sub(rf"]({config.extra['repository']}/blob/main/\1)", markdown)


def on_page_content(html, page, config, files):
    """Link each figure to its file, and keep options such as --minutes on one line."""
    html = FIGURE.sub(r'<a class="figure" href="\2">\1</a>', html)
    return INLINE_CODE.sub(
        lambda code: HYPHENATED.sub(r'<span class="whole">\g<0></span>', code.group()), html
    )


def on_post_page(output, page, config):
    """Stop at a page that a browser would complete with a file of another server."""
    loaded = re.search(
        r"<(?:script|img|iframe)[^>]+https?:[^>]*>|<link[^>]+stylesheet[^>]+https?:[^>]*>", output
    )
    if loaded:
        raise PluginError(f"{page.file.src_path}: loads from another server: {loaded.group()}")
    return output
