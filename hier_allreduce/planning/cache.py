"""Results of searches, kept in files of the user's cache folder for the next process.

::

    ~/.cache/hier_allreduce/searches/SHA256.json       {"of": "_search(…) of hier_allreduce 0.1.0", "result": …}

The name of a file is a digest of the version, of the planner's own source, of the function and of all its arguments. So
a changed planner, machine or size never meets an old result. The files are JSON, and what they hold is checked like any
other input: a file that is cut, changed or of another format is ignored and written anew. Where nothing can be written,
nothing is kept.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, Callable, Optional, TypeVar, cast

from .. import __version__
from ..presets import CACHE_VARIABLE, user_folder

F = TypeVar("F", bound=Callable[..., Any])

_INVALID = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OSError)


def cache_folder() -> Optional[Path]:
    """Return the folder of this package's cache; None if ``$HIER_ALLREDUCE_CACHE`` is empty, which turns it off."""
    return None if os.environ.get(CACHE_VARIABLE) == "" else user_folder()


def kept(encode: Callable[[Any], Any], decode: Callable[[Any, Any], Any]) -> Callable[[F], F]:
    """Return a decorator that keeps a function's results in files.

    Args:
        encode: from a result to JSON values.
        decode: ``decode(values, topology)``, from JSON values to a result for the function's first argument. It raises
            a ``ValueError`` (or TypeError, KeyError, IndexError) for values that are no such result.

    The ``repr`` of the function's arguments shows all that the result depends on.
    """

    def decorator(function: F) -> F:
        @functools.wraps(function)
        def call(topology: Any, *arguments: Any, **named: Any) -> Any:
            path = _path(function.__name__, (topology, arguments, sorted(named.items())))
            if path is None:
                return function(topology, *arguments, **named)
            with contextlib.suppress(*_INVALID):
                return decode(json.loads(path.read_bytes())["result"], topology)
            result = function(topology, *arguments, **named)
            _write(path, {"of": f"{function.__name__} of hier_allreduce {__version__}", "result": encode(result)})
            return result

        return cast(F, call)

    return decorator


def as_tuples(values: Any) -> Any:
    """Return JSON values with tuples where JSON has lists, also inside."""
    return tuple(map(as_tuples, values)) if isinstance(values, list) else values


def _path(name: str, arguments: Any) -> Optional[Path]:
    folder = cache_folder()
    if folder is None:
        return None
    key = json.dumps([__version__, _source(), name, repr(arguments)])
    return folder / "searches" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"


@functools.lru_cache(maxsize=1)
def _source() -> str:
    """Return a digest of the modules that make plans, which change more often than the version."""
    digest, here = hashlib.sha256(), Path(__file__).parent
    for path in sorted([*here.glob("*.py"), *(here.parent / "topology").glob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _write(path: Path, content: Any) -> None:
    """Write a file as a whole or not at all: other processes may read it meanwhile."""
    with contextlib.suppress(OSError):  # a full disk or a folder without permission: the next process searches again
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        number, name = tempfile.mkstemp(dir=str(path.parent), suffix=".part")
        try:
            with os.fdopen(number, "w", encoding="utf-8") as file:
                file.write(json.dumps(content))  # json.dump takes several times as long
            os.replace(name, str(path))
        except OSError:
            os.unlink(name)
            raise
