"""Tables of the reference, made from the code: ``INCLUDED[NAME]()`` is one, as Markdown.

Nothing here needs TensorFlow.
"""

import argparse
import html
import inspect
import re

from hier_allreduce.commands.entry import parser
from hier_allreduce.planning import Strategy


def commands():
    """Return a section for each command: its sentence, usage and arguments."""
    sections = []
    for name, command in _subcommands(parser()).items():
        usage = re.sub(r"\n\s+", "\n    ", command.format_usage().replace("usage: ", "").strip())
        rows = [
            _argument(action)
            for action in command._actions
            if not isinstance(action, argparse._HelpAction)
        ]
        sentence = f"{command.description[:1].upper()}{command.description[1:]}."
        head = [f"## {name}", "", sentence, "", f"```\n{usage}\n```", ""]
        sections.append("\n".join([*head, *_table(["argument", "meaning"], rows)]))
    return "\n\n".join(sections)


def _subcommands(command):
    return next(a.choices for a in command._actions if isinstance(a, argparse._SubParsersAction))


def _argument(action):
    value = "" if action.nargs == 0 else action.metavar or action.dest.upper()
    names = ", ".join(f"{name} {value}".strip() for name in action.option_strings) or str(value)
    text = " ".join((action.help or "").split()).replace("%%", "%")
    return f"<code>{html.escape(names)}</code>", text


def attributes(cls):
    """Return a table of the ``Attributes:`` in a class's docstring."""
    section = re.split(r"\n\n?(?=\S)", inspect.getdoc(cls).split("Attributes:\n", 1)[1])[0]
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
    return "\n".join(
        _table(["key", "meaning"], [(f"`{name}`", _markdown(text)) for name, text in entries])
    )


def _markdown(text):
    return re.sub(r":\w+:`[.~]?(\w+)`", r"`\1`", " ".join(text.split()).replace("``", "`"))


def _table(head, rows):
    lines = []
    for row in (head, ["---"] * len(head), *rows):
        cells = [str(cell).replace("|", "&#124;") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


INCLUDED = {
    "commands": commands,
    "strategy": lambda: attributes(Strategy),
}
