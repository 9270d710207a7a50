"""Inside the user's program: the first file of ``tune`` that runs there.

``tune`` copies this file as ``sitecustomize.py`` into a folder on the program's PYTHONPATH, so it
imports nothing of the package when Python starts. At the import of our all-reduce it imports
``inside``. At the import of TensorFlow it starts a thread, which finds out whether TensorFlow runs
without an all-reduce of this package: it looks at the stacks five times a second, counts how often
TensorFlow executes a graph or a function, and writes down the result.
"""

from __future__ import annotations

import gc
import importlib.machinery
import importlib.util
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, Dict, Set

VARIABLE = "HIER_ALLREDUCE_TUNE"
PAUSE = 0.2  # seconds
SEEN_AFTER = 4.0  # seconds in which TensorFlow executes something
BUILT_WITHIN = 30.0  # such seconds before ours is built, in a program that imports it
_EXECUTING = (
    os.path.join("tensorflow", "python", "client", "session.py"),
    os.path.join("tensorflow_core", "python", "client", "session.py"),  # TensorFlow 1.15
    os.path.join("tensorflow", "python", "eager", "execute.py"),
)
_CHANGE_BY_FRONT_END = {
    "keras": """\
from hier_allreduce.integrations.distribute import HierarchicalAllReduce
tf.distribute.MirroredStrategy(cross_device_ops=HierarchicalAllReduce())""",
    "tensorpack": """\
from hier_allreduce.integrations.tensorpack import HierarchicalTrainer
tf.compat.v1.enable_resource_variables()    # before the model is built
launch_train_with_config(config, HierarchicalTrainer(GPUS))""",
    "towers": """\
grads = hier_allreduce.allreduce_grads(grads, devices, average=True)    # K×N gradients of K towers
tf.distribute.MirroredStrategy(cross_device_ops=HierarchicalAllReduce())    # or of a strategy""",
}


def check(clock: str) -> None:
    """End a run in which TensorFlow is seen without ours; in the process of ``tune``.

    Raises:
        NothingMeasured: TensorFlow runs, but no all-reduce of this package was built. A program
            that imports this package has more time, because it may restore a checkpoint first.
    """
    # It is imported here, because the copy in the program has no such module beside it.
    from .faults import NothingMeasured

    path = Path(clock + ".seen")
    if not path.exists() or Path(clock + ".facts").exists():
        return
    seen = json.loads(path.read_text(encoding="utf-8"))
    if seen["imports_ours"] and seen["seconds"] < BUILT_WITHIN:
        return
    change = "".join(
        f"\n    {line}" for line in _CHANGE_BY_FRONT_END[seen["front_end"]].splitlines()
    )
    raise NothingMeasured(
        "TensorFlow runs, but no all-reduce of this package was built, so the program was ended."
        f" Change the program first:{change}"
    )


def has_begun(clock: str) -> bool:
    """Return whether a Python of the run has read this file."""
    return Path(clock + ".begun").exists()


def _observe(clock: str) -> None:
    """Count executing TensorFlow, and write it down, until the all-reduce is built."""
    seconds = 0.0
    front_end = ""
    while not os.path.exists(clock + ".facts"):
        time.sleep(PAUSE)
        # A thread whose newest frame is one of these waits for TensorFlow's executor.
        files = [str(frame.f_code.co_filename) for frame in sys._current_frames().values()]
        if not any(file.endswith(_EXECUTING) for file in files):
            continue
        seconds += PAUSE
        if seconds < SEEN_AFTER:
            continue
        if not front_end and "tensorpack" in sys.modules:
            front_end = "tensorpack"
        if not front_end:
            # All objects are looked at once only, because a program may have millions of them.
            types = {type(thing).__name__ for thing in gc.get_objects()}
            is_mirrored = types & {"MirroredStrategy", "MirroredStrategyV1"}
            front_end = "keras" if is_mirrored else "towers"
        seen: Dict[str, Any] = {
            "seconds": seconds,
            "imports_ours": "hier_allreduce" in sys.modules,
            "front_end": front_end,
        }
        # The file gets its name when it is whole, so that the reader never sees half a file.
        with open(clock + ".seen.new", "w", encoding="utf-8") as file:
            json.dump(seen, file)
        os.replace(clock + ".seen.new", clock + ".seen")


class _OnImport:
    """An entry of ``sys.meta_path`` that finds nothing, and begins at the imports it waits for."""

    def __init__(self, clock: str):
        self._clock = clock
        self._begun: Set[str] = set()

    def find_spec(self, fullname: str, *_: Any) -> None:
        """Begin at the import of TensorFlow, or of ours: other processes get no thread."""
        if fullname in self._begun:
            return
        if fullname == "tensorflow" and self._clock:
            self._begun.add(fullname)
            threading.Thread(target=_observe, args=(self._clock,), daemon=True).start()
        if fullname == "hier_allreduce.graph.allreduce":
            self._begun.add(fullname)
            inside = importlib.import_module("hier_allreduce_tools.tune.inside")
            inside.begin(os.environ[VARIABLE])


def _run_hidden_module() -> None:
    """Run the ``sitecustomize`` of the machine, which this file hides."""
    here = os.path.dirname(os.path.abspath(__file__))
    elsewhere = [path for path in sys.path if os.path.abspath(path) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize":
    _run_hidden_module()
    if VARIABLE in os.environ:
        # A program may set the variable itself, and then nobody waits for a clock.
        try:
            clock = str(json.loads(os.environ[VARIABLE])["clock"])
        except (KeyError, TypeError, ValueError):
            clock = ""
        if clock:
            open(clock + ".begun", "w").close()
        on_import: Any = _OnImport(clock)
        sys.meta_path.insert(0, on_import)
