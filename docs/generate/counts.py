"""Count what an owner of Python code pays for: lines to read, and what each of them may do.

python docs/generate/counts.py                  # the package and the tools, and their sum
python docs/generate/counts.py FOLDER …         # others, such as those of an older checkout
"""

import ast
import sys
from collections import Counter
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
BOTH = (TOP / "hier_allreduce", TOP / "tools" / "hier_allreduce_tools")
_DECISIONS = (ast.If, ast.While, ast.IfExp, ast.BoolOp, ast.ExceptHandler)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def counts_of(folder):
    """Return the counts of the Python files in a folder, by what is counted."""
    counted = Counter()
    functions = Counter()
    uses = Counter()
    for path in sorted(Path(folder).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        nodes = list(ast.walk(ast.parse(source)))
        counted["files"] += 1
        counted["lines"] += len(source.splitlines())
        counted["types"] += sum(isinstance(node, ast.ClassDef) for node in nodes)
        counted["decisions"] += sum(isinstance(node, _DECISIONS) for node in nodes)
        counted["expression nodes"] += sum(isinstance(node, ast.expr) for node in nodes)
        refusals = {line for node in nodes if refuses(node) for line in lines_of(node)}
        counted["lines that raise or warn"] += len(refusals)
        functions.update(node.name for node in nodes if isinstance(node, _FUNCTIONS))
        reads = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Load)]
        uses.update(getattr(node, "id", getattr(node, "attr", None)) for node in reads)
    # Python itself calls __init__ and the like. Of a name with two functions it is not known which
    # of them is used.
    named = [name for name in functions if not name.startswith("__")]
    once = [name for name in named if functions[name] == uses[name] == 1]
    counted["functions with one use"] = len(once)
    return counted


def refuses(node):
    """Return whether a statement raises an error, or warns."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = node.value.func
        return getattr(called, "id", getattr(called, "attr", "")) in ("warn", "warning")
    return isinstance(node, ast.Raise)


def lines_of(statement):
    """Return the numbers of a statement's lines."""
    # Python 3.7 does not keep where a statement ends.
    last = max(getattr(node, "lineno", 0) for node in ast.walk(statement))
    return range(statement.lineno, getattr(statement, "end_lineno", last) + 1)


def main(folders):
    counts_by_folder = {str(folder): counts_of(folder) for folder in folders or BOTH}
    columns = {**counts_by_folder, "together": sum(counts_by_folder.values(), Counter())}
    for folder, counted in columns.items():
        print(folder)
        for what, number in counted.items():
            print(f"{number:>8,}  {what}")
        share = counted["lines that raise or warn"] / counted["lines"]
        print(f"{share:>8.1%}  of the lines raise or warn")


if __name__ == "__main__":
    main(sys.argv[1:])
