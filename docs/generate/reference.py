"""``make reference`` writes the pages of the reference from the code.

A page says ``<!-- reference: NAME -->`` before such a part and ``<!-- end -->`` after it. NAME is a
public name, as a program imports it, or a key of ``TABLES``. Nothing here imports TensorFlow:
griffe reads the sources.
"""

import argparse
import ast
import functools
import logging
import re
import textwrap
from itertools import starmap

import griffe
from page_tables import TOP, PageTables
from page_tables import markdown as table

from hier_allreduce_tools.entry import parser

# one docstring says of several arguments together that they are as in another class
logging.getLogger("griffe").setLevel(logging.ERROR)

PAGES = [f"docs/reference/{name}.md" for name in ("api", "commands", "files")]
WIDTH = 88  # a longer signature has a line for each parameter

# not written by callers; options that a function does not have end in ``unknown``, for its error
LEFT_OUT = ("self", "cls", "unknown")
# called by TensorFlow, tensorpack and this package, not by programs
HOOKS = ("after_run", "batch_reduce_implementation", "before_run", "initialize")
HOOKS += ("reduce_implementation",)

TITLES = {
    "parameters": "Arguments",
    "attributes": "Attributes",
    "raises": "Errors",
    "returns": "Result",
    "yields": "Yields",
}

LITERAL = re.compile(r"(?m)^(.*)::[ ]*\n\n((?: {4}.*\n|\n)+)")
ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):`[.~]?([\w.]+)`")
PAGE = re.compile(r"(?<![\w/`])docs/([\w/-]+)\.md\b")


# ---- the API -------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=None)
def package(name="hier_allreduce"):
    """Return the package, or that of the tools, as griffe reads it from its sources."""
    return griffe.load(
        name,
        search_paths=[str(TOP), str(TOP / "tools")],
        docstring_parser="google",
        allow_inspection=False,
        resolve_aliases=True,
    )


def api(path):
    """Return the part of one public name: signature, docstring and, of a class, its methods."""
    distribution, _, inside = path.partition(".")
    obj = package(distribution)[inside]
    obj = obj.final_target if obj.is_alias else obj
    if obj.is_module:
        public = filter(is_for_programs, own(obj))
        texts = [described(one, f"hier_allreduce.{one.name}") for one in public]
        return "\n\n".join([docstring(obj), *texts])
    return described(obj, path)


def own(obj):
    """Return the members of a module or class that it defines itself."""
    return [member for member in obj.members.values() if not member.is_alias]


def described(obj, path):
    """Return a heading, the signature and the docstring of an object, then of its methods."""
    parts = [f"### {'class ' * obj.is_class}{obj.name}", signature(obj, path), docstring(obj)]
    if obj.is_class:
        for member in filter(is_for_programs, own(obj)):
            name = f"{obj.name}.{member.name}"
            parts += [f"#### {name}", signature(member, name), docstring(member)]
    return "\n\n".join(part for part in parts if part)


def is_for_programs(member):
    """Return whether a member is for programs; one without a docstring is not."""
    return not member.name.startswith("_") and member.name not in HOOKS and bool(member.docstring)


def signature(obj, name):
    """Return how an object is called, or the type of a property, as a block of code."""
    if obj.is_attribute:
        return f"```python\n{name}: {obj.annotation}\n```"
    parameters = parameters_of(obj)
    returned = f" -> {obj.returns}" if obj.is_function and obj.returns else ""
    line = f"{name}({', '.join(parameters)}){returned}"
    if len(line) > WIDTH:
        line = "\n    ".join([f"{name}(", *(f"{one}," for one in parameters)]) + f"\n){returned}"
    return f"```python\n{line}\n```"


def parameters_of(obj):
    """Return the parameters of a function or a class; a dataclass has its fields instead."""
    makers = [obj] if obj.is_function else [one for one in own(obj) if one.name == "__init__"]
    if makers and makers[0].is_function:
        return [parameter(one) for one in makers[0].parameters if one.name not in LEFT_OUT]
    fields = [one for one in own(obj) if one.is_attribute and one.annotation]
    return [field(one) for one in fields if "property" not in one.labels]


def field(one):
    """Return a field of a dataclass as a parameter."""
    return f"{one.name}: {one.annotation}" + (f" = {one.value}" if one.value else "")


def parameter(one):
    """Return a parameter as Python writes it."""
    stars = {"var_positional": "*", "var_keyword": "**"}.get(one.kind.name, "")
    default = f" = {one.default}" if one.default is not None and not stars else ""
    return f"{stars}{one.name}: {one.annotation}{default}"


def docstring(obj):
    """Return a docstring as Markdown: its text, then a list for each section."""
    parts = []
    for section in sections(obj):
        if section.kind.value == "text":
            parts.append(markdown(section.value))
        elif section.kind.value in TITLES:
            title = TITLES[section.kind.value]
            entries = [entry(item) for item in section.value if item_name(item) != "unknown"]
            parts.append("\n".join([f"**{title}**", "", *entries]) if entries else "")
        else:
            raise ValueError(f"{obj.path}: no form for the section {section.kind.value}")
    return "\n\n".join(part for part in parts if part)


def sections(obj):
    """Return the sections of a docstring; a class's attributes follow what ``__init__`` says."""
    written = obj.docstring.parsed if obj.docstring else []
    if not obj.is_class:
        return written
    attributes = [section for section in written if section.kind.value == "attributes"]
    makers = [member for member in own(obj) if member.name == "__init__"]
    of_makers = [section for maker in makers for section in sections(maker)]
    return [*(section for section in written if section not in attributes), *of_makers, *attributes]


def entry(item):
    """Return a line of a list: a name, or the type of an error, and what it says."""
    text = " ".join(markdown(item.description).split())
    names = ", ".join(f"`{name}`" for name in item_name(item).split(", "))
    return f"- {names}: {text}" if item_name(item) else f"- {text}"


def item_name(item):
    """Return the name of a parameter or attribute, or an error's class; of results nothing."""
    is_error = item.kind.value == "raise" if hasattr(item, "kind") else not hasattr(item, "name")
    return str(item.annotation) if is_error else item.name or ""


def markdown(text):
    """Return the text of a docstring, which is written for an editor, as Markdown."""
    text = LITERAL.sub(_block, f"{text}\n".replace("``", "`"))
    text = PAGE.sub(r"[\1.md](../\1.md)", text)
    return ROLE.sub(lambda match: _link(match[1]), text).strip()


def _block(match):
    """Return an indented block as one in fences."""
    lead = f"{match[1]}:\n\n" if match[1].strip() else ""
    code = textwrap.dedent(match[2]).strip("\n")
    return f"{lead}```{'python' * is_python(code)}\n{code}\n```\n\n"


def is_python(text):
    """Return whether a block is a program, and not a picture."""
    try:
        ast.parse(text.replace(", …", "").replace("…", "..."))
    except SyntaxError:
        return False
    return True


def _link(name):
    """Return a name as code, with a link if the page of the API has it."""
    last = name.rpartition(".")[2]
    return f"[`{last}`](api.md#{headings()[last]})" if last in headings() else f"`{last}`"


@functools.lru_cache(maxsize=None)
def headings():
    """Return the anchors on the page of the API, by name."""
    page = (TOP / PAGES[0]).read_text(encoding="utf-8")
    names = [match[2].rpartition(".")[2] for match in ON_PAGES.frame.finditer(page)]
    return {name: f"class-{name.lower()}" if name[0].isupper() else name for name in names}


# ---- commands and files --------------------------------------------------------------------------


def commands():
    """Return a section for each command: its sentence, usage and arguments."""
    return "\n\n".join(starmap(command, subcommands(parser()).items()))


def command(name, options):
    """Return the section of one command, from what its ``--help`` prints."""
    usage = " ".join(options.format_usage().replace("usage: ", "").split())
    sentence = f"{options.description[:1].upper()}{options.description[1:]}."
    shown = [one for one in options._actions if not isinstance(one, argparse._HelpAction)]
    rows = [["argument", "meaning"], *map(argument, shown)]
    return f"## {name}\n\n{sentence}\n\n```bash\n{usage}\n```\n\n{table(rows)}"


def subcommands(options):
    """Return the parsers of all commands by name."""
    return next(one.choices for one in options._actions if hasattr(one.choices, "items"))


def argument(action):
    """Return a row: an option with its value, and its help."""
    value = "" if action.nargs == 0 else action.metavar or action.dest.upper()
    names = ", ".join(f"{name} {value}".strip() for name in action.option_strings) or str(value)
    text = " ".join((action.help or "").split()).replace("%%", "%")
    return [f"`{names}`", text]


def strategy():
    """Return the table of a strategy's keys: the attributes in the docstring of its class."""
    sections = package()["Strategy"].docstring.parsed
    attributes = next(part.value for part in sections if part.kind.value == "attributes")
    rows = [[f"`{one.name}`", " ".join(markdown(one.description).split())] for one in attributes]
    return table([["key", "meaning"], *rows])


TABLES = {"commands": commands, "strategy": strategy}


def part(name):
    """Return the part of a public name, or of a key of ``TABLES``, as the code says it today."""
    return TABLES[name]() if name in TABLES else api(name)


ON_PAGES = PageTables("reference", PAGES, part)
with_parts = ON_PAGES.in_text

if __name__ == "__main__":
    ON_PAGES.write()
