"""Reference pages from the code: Markdown that mkdocs inserts where a page says ``<!-- include: NAME -->``.

``INCLUDED`` maps each name to the function that returns its Markdown. Nothing here needs TensorFlow.
"""

import argparse
import csv
import html
import inspect
import json
import re
import sys
from itertools import groupby
from pathlib import Path

from hier_allreduce import presets
from hier_allreduce.cli.entry import parser
from hier_allreduce.cluster import config
from hier_allreduce.planning import Strategy
from hier_allreduce.topology import gpus, topology

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from published import nccl_markdown

DOCS = Path(__file__).parents[1]

# What docstrings do not say. A key of a file that is neither here nor in a docstring is an error.
_MACHINE = {
    "name": "the name that is shown; by default the file's",
    "matrix": "the output of `nvidia-smi topo -m`, below `matrix: |2`, each line indented by two spaces",
    "gpu": "the GPU model, which decides the speeds: `V100`, `RTX 3090`, …",
    "speeds": "speeds of the machine, by the keys below",
    "links": "bytes/s each way of a kind of link (`SYS`) or of one pair (`GPU0-GPU3`)",
    "staged": "kinds of links, or pairs, without peer access: by default those that the model implies; `[]`: none",
    "shared": "what copies share: a name, its bytes/s, and the copies as senders and their receivers",
    "measured": "when, with which versions and on which devices the speeds were measured",
}
_TRAINER = {
    "devices": "how many GPUs, or a list of GPU ids or device names",
    "average": "true for the mean of all towers' gradients, false for their sum",
    "strategy": "the name or file of a strategy, or its keys",
    "update": "`replicated`: every tower updates its own variables. `main`: each variable is updated once, on its main",
    "broadcast": "when tower 0's variables are copied to the others: start, never, or a number of steps",
    "check_replicas_every": "steps between comparisons of the towers; 0: never",
    "lanes_per_gpu": "lanes of each tower, over which gradients travel; 0: none",
}
_CLUSTER = {
    "hosts": "a list of `HOST:PORT`, one for each host; the first one is the chief",
    "devices_per_host": "how many devices each host uses",
}


# ---- commands ----------------------------------------------------------------------------------------


def commands():
    """Return a section for each command, and for each command of a command."""
    return "\n\n".join(_command_sections(parser(), 2))


def _command_sections(command, level):
    for name, sub in _subcommands(command).items():
        lines = [f"{'#' * level} {name}", "", _sentence(sub.description or ""), "", "```", _usage(sub), "```"]
        rows = [_option_row(action) for action in sub._actions if _is_shown(action)]
        if rows:
            lines += ["", *_table(["argument", "meaning"], rows)]
        yield "\n".join(lines)
        yield from _command_sections(sub, level + 1)


def _subcommands(command):
    """Return each command's parser by its name; deferred ones get their options first."""
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _is_shown(action):
    hidden = (argparse._HelpAction, argparse._SubParsersAction)
    return not isinstance(action, hidden) and action.help != argparse.SUPPRESS


def _usage(command):
    return re.sub(r"\n\s+", "\n    ", command.format_usage().replace("usage: ", "").strip())


def _option_row(action):
    value = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
    if action.choices and not action.metavar:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    names = [f"{name} {value}".strip() if action.nargs != 0 else name for name in action.option_strings] or [str(value)]
    text = _sentence((action.help or "") % {**vars(action), "prog": ""} if action.help else "")
    return [", ".join(_code(name) for name in names), text]


def _code(text):
    """Return text as code that may have a bar in a table."""
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>"


def _sentence(text):
    text = " ".join(text.split())
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "`")) or not text else ".")


# ---- files -------------------------------------------------------------------------------------------


def files_page():
    """Return a section for each kind of YAML file: its presets, and a table of its keys."""
    strategy = attributes(Strategy)
    sections = [
        ("A strategy", "strategies", "`Strategy.load(NAME)`, or `strategy=NAME` of every entry point", strategy),
        ("A trainer", "trainers", "`HierarchicalTrainer.from_config(NAME)`", _TRAINER),
        ("A machine", "machines", "`TOPOLOGY` of the commands, `Strategy(topology=NAME)`", _machine()),
        ("Speeds", "", "`speeds:` of a machine", attributes(gpus.Speeds)),
        ("A cluster", "clusters", "`Cluster.load(NAME, task)`", _meanings(config._FIELDS, _CLUSTER)),
    ]
    return "\n\n".join(_file_section(*section) for section in sections)


def _machine():
    return _meanings(topology._YAML_FIELDS, _MACHINE)


def _meanings(keys, texts):
    """Return the meaning of each key of a file.

    Raises:
        KeyError: the code knows a key that has no text here.
    """
    unexplained = [key for key in keys if key not in texts]
    if unexplained:
        raise KeyError(f"docs/generate/reference.py explains no key {', '.join(unexplained)}")
    return {key: text for key, text in texts.items() if key in keys}


def _file_section(heading, kind, use, keys):
    names = ", ".join(f"`{name}`" for name in presets.names(kind)) if kind else ""
    lines = [f"## {heading}", "", f"Used by {use}." + (f" Presets: {names}." if names else "")]
    return "\n".join([*lines, "", *_table(["key", "meaning"], [[f"`{key}`", text] for key, text in keys.items()])])


def attributes(cls):
    """Return the text of each entry in the ``Attributes:`` of a class's docstring, as Markdown."""
    section = inspect.getdoc(cls).split("Attributes:\n", 1)[1]
    section = re.split(r"\n\n?(?=\S)", section)[0]
    entries = re.findall(r"^ {4}([\w, ]+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
    return {name: _markdown(text) for names, text in entries for name in re.split(r", ?", names)}


def _markdown(text):
    text = re.sub(r":\w+:(?=`)", "", " ".join(text.split()).replace("``", "`"))
    return re.sub(r"\bdocs/([\w/-]+\.md)\b", r"[\1](../\1)", text)


# ---- plans -------------------------------------------------------------------------------------------


def plan_schema():
    """Return a table of the keys of ``plan --json``, from its schema."""
    schema = json.loads((DOCS / "reference" / "plan.schema.json").read_text(encoding="utf-8"))
    rows = [[f"`{key}`", _kind(value), _sentence(value["description"])] for key, value in schema["properties"].items()]
    return "\n".join(_table(["key", "type", "meaning"], rows))


def _kind(value):
    inner = value.get("items", {}).get("type", "object") if value["type"] == "array" else ""
    return f"array of {inner}s" if inner else value["type"]


# ---- measurements ------------------------------------------------------------------------------------


def _read(name):
    with (DOCS / "data" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def summary(name):
    """Return a table of the ratios in a CSV file of ``docs/data``: a row for each contender, a column for each case."""
    ratios = {(row["contender"], row["case"]): row["times ours"] for row in _read(name)}
    contenders, cases = (list(dict.fromkeys(key[place] for key in ratios)) for place in (0, 1))
    head = ["times ours", *(case.split(" over ")[0] for case in cases)]
    rows = [[name, *(ratios.get((name, case), "–") for case in cases)] for name in contenders]
    lines = _table(head, rows)
    return "\n".join([lines[0], f"| {' | '.join([':--', *['--:'] * len(cases)])} |", *lines[2:]])


def measured(name):
    """Return a section for each case of a CSV file in ``docs/data``: its note, and a table of its rows."""
    rows, sections = _read(name), []
    for (case, note), group in groupby(rows, key=lambda row: (row["case"], row["note"])):
        cells = [[value for key, value in row.items() if key not in ("case", "note")] for row in group]
        head = [key for key in rows[0] if key not in ("case", "note")]
        sections.append("\n".join([f"### {case}", "", note, "", *_table(head, cells)]))
    return "\n\n".join(sections)


def _table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(map(_cell, line))} |" for line in lines]


def _cell(text):
    """Return text that may have bars, in code too, as a cell of a table."""
    return re.sub(r"`([^`]*\|[^`]*)`", lambda match: _code(match.group(1)), text).replace("|", "&#124;")


def use():
    """Return README's table of when to use the package, with links from a page in ``docs/``."""
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    return re.search(r"\| use it \|.*\n(?:\|.*\n)+", readme).group().replace("](docs/", "](")


INCLUDED = {
    "commands": commands,
    "files": files_page,
    "nccl": nccl_markdown,
    "plan-schema": plan_schema,
    "use": use,
    "measurements": lambda: measured("measurements"),
    "defaults": lambda: measured("defaults"),
}
