"""Count how a folder of Python files is cut into functions, named and commented.

python docs/generate/counts.py                  # the package
python docs/generate/counts.py FOLDER …         # others, such as an older checkout of it
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "hier_allreduce"

# Names that say no more than "it": where a noun is known, it is the better name.
PRONOUNS = (
    {"each", "every", "one", "other", "others", "rest", "that", "this", "now", "first", "last"}
    | {"entry", "found", "item", "kind", "part", "parts", "result", "results", "thing"}
    | {"name", "names", "number", "numbers", "row", "rows", "text", "texts", "value", "values"}
)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def counts_of(folder):
    """Return the counts of the Python files in a folder, by what is counted."""
    files = sorted(Path(folder).rglob("*.py"))
    functions = steps = names = pronouns = lines = comments = 0
    for path in files:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        functions += sum(isinstance(node, _FUNCTIONS) for node in ast.walk(tree))
        steps += len(private_with_one_caller(tree))
        bound = list(bound_names(tree))
        names += len(bound)
        pronouns += sum(name in PRONOUNS for name in bound)
        lines += len(source.splitlines())
        comments += comment_lines(source)
    return {
        "files": len(files),
        "lines": lines,
        "functions": functions,
        "private functions with one caller": steps,
        "pronouns among names, %": round(100 * pronouns / names, 1),
        "comments among lines, %": round(100 * comments / lines, 1),
    }


def private_with_one_caller(tree):
    """Return the names of a file's private functions that are used in one place."""
    private = set()
    uses = Counter()
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS) and re.match("_[^_]", node.name):
            private.add(node.name)
        elif isinstance(getattr(node, "ctx", None), ast.Load):
            uses[getattr(node, "id", getattr(node, "attr", None))] += 1
    return sorted(name for name in private if uses[name] == 1)


def bound_names(tree):
    """Yield the names that a file binds: its parameters, and the targets of its statements."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(getattr(node, "ctx", None), ast.Store):
            name = getattr(node, "id", getattr(node, "attr", None))
            if name is not None:
                yield name


def comment_lines(source):
    """Return the number of lines that are a comment and nothing else."""
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    return sum(
        token.type == tokenize.COMMENT and token.line.lstrip().startswith("#") for token in tokens
    )


def main(folders):
    for folder in folders or [PACKAGE]:
        print(folder)
        for counted, count in counts_of(folder).items():
            print(f"  {count:>8}  {counted}")


if __name__ == "__main__":
    main(sys.argv[1:])
