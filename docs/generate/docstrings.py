"""griffe's extension: docstrings as the site's Markdown. They are written so that they also read well in an editor."""

import re

import griffe

LITERAL = re.compile(r"(?m)^( *)(.*\S)?::[ ]*$(?=\n\n)")
ROLE = re.compile(r":(?:class|func|meth|mod|attr):`~?([\w.]+)`")
PAGE = re.compile(r"(?<![\w/`])docs/([\w/-]+)\.md\b")
SEVERAL = re.compile(r"(?m)^( +)(\w+(?:, \w+)+): ((?:.*)(?:\n\1 +.*)*)")


class Markdown(griffe.Extension):
    """Turns ``::`` before an indented block, roles, and parameters that share a text into Markdown."""

    def on_instance(self, *, obj, **kwargs):
        """Convert the docstring of an object that was just read."""
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value, obj)


def markdown(text, obj):
    """Return the docstring of an object with Markdown's forms, for a page in docs/reference."""
    text = LITERAL.sub(lambda match: f"{match.group(1)}{match.group(2)}:" if match.group(2) else "", text)
    text = SEVERAL.sub(_one_by_one, text)
    text = PAGE.sub(r'<a href="../\1.html">\1.md</a>', text)
    return ROLE.sub(lambda match: _link(match.group(1), obj), text)


def _link(name, obj):
    """Return a link to a name as the object's module knows it; one without an entry in the API stays text."""
    try:
        path = name if "." in name else obj.resolve(name)
    except griffe.NameResolutionError:
        path = name
    return f'<autoref optional identifier="{path}"><code>{name}</code></autoref>'


def _one_by_one(match):
    """Repeat a short text for each name; a long one stands at the first, to which the others refer."""
    indent, names, meaning = match.groups()
    first, *others = names.split(", ")
    again = meaning if len(meaning) < 100 else f"see ``{first}``."
    return "\n".join([f"{indent}{first}: {meaning}", *(f"{indent}{name}: {again}" for name in others)])
