"""griffe's extension: docstrings as the site's Markdown. They are written so that they also read well in an editor."""

import re

import griffe

LITERAL = re.compile(r"(?m)^( *)(.*\S)?::[ ]*$(?=\n\n)")
ROLE = re.compile(r":(?:class|func|meth|mod|attr):`~?([\w.]+)`")
# a name without an entry in the API stays text
LINK = r'<autoref optional identifier="\1"><code>\1</code></autoref>'
SEVERAL = re.compile(r"(?m)^( +)(\w+(?:, \w+)+): ((?:.*)(?:\n\1 +.*)*)")


class Markdown(griffe.Extension):
    """Turns ``::`` before an indented block, roles, and parameters that share a text into Markdown."""

    def on_instance(self, *, obj, **kwargs):
        """Convert the docstring of an object that was just read."""
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text):
    """Return a docstring with Markdown's forms."""
    text = LITERAL.sub(lambda match: f"{match.group(1)}{match.group(2)}:" if match.group(2) else "", text)
    text = ROLE.sub(LINK, text)
    return SEVERAL.sub(_one_by_one, text)


def _one_by_one(match):
    indent, names, meaning = match.groups()
    return "\n".join(f"{indent}{name}: {meaning}" for name in names.split(", "))
