"""griffe's extension: docstrings, which are written for an editor, as the site's Markdown."""

import re

import griffe

LITERAL = re.compile(r"(?m)^( *)(.*\S)?::[ ]*$(?=\n\n)")
ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):`[.~]?([\w.]+)`")
SEVERAL = re.compile(r"(?m)^( +)(\w+(?:, \w+)+): (.*(?:\n\1 +.*)*)")
PAGE = re.compile(r"(?<![\w/`])docs/([\w/-]+)\.md\b")


class Markdown(griffe.Extension):
    """Turns ``::`` before an indented block, roles and names of pages into Markdown."""

    def on_instance(self, *, obj, **kwargs):
        """Convert the docstring of an object that was just read."""
        if obj.docstring:
            text = LITERAL.sub(
                lambda match: f"{match[1]}{match[2]}:" if match[2] else "", obj.docstring.value
            )
            text = SEVERAL.sub(_one_by_one, text)
            text = PAGE.sub(r'<a href="../\1.html">\1.md</a>', text)
            obj.docstring.value = ROLE.sub(lambda match: _link(match[1], obj), text)


def _link(name, obj):
    """Return a link to a name, found as the object's module knows it.

    A name without an entry in the API stays text.
    """
    try:
        path = name if "." in name else obj.resolve(name)
    except griffe.NameResolutionError:
        path = name
    return f'<autoref optional identifier="{path}"><code>{name}</code></autoref>'


def _one_by_one(match):
    """Repeat the text that several parameters share for each of them."""
    return "\n".join(f"{match[1]}{name}: {match[3]}" for name in match[2].split(", "))
