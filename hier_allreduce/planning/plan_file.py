"""Plans as files: what ``hier-allreduce plan --json`` prints, and ``Strategy(plan="plan.json")`` runs.

::

    Plan ──plan_values──► {"format": 1, "devices": 2, "steps": [{"op": "reduce", …}, …], …} ──plan_text──► JSON
      ▲                                                                                                     │
      └──────────────────────────────────────── load_plan ◄─────────────────────────────────────────────────┘

docs/reference/plan.schema.json describes the keys.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Dict, Mapping, Union

from .. import presets
from ..errors import HierAllreduceError
from ..presets import Field, Reader
from .plan import Copy, Plan, Reduce, Step, verify

FORMAT = 1  # of the file; a reader refuses any other


def plan_values(plan: Plan) -> Dict[str, Any]:
    """Return the keys that make a plan."""
    return {
        "format": FORMAT,
        "devices": plan.towers,
        "lanes": plan.lanes,
        "algorithm": plan.algorithm,
        "shares": list(plan.shares or [1 / plan.chunks] * plan.chunks),
        "buckets": list(plan.buckets or [0] * plan.chunks),
        "steps": [{"op": type(step).__name__.lower(), **step._asdict()} for step in plan.steps],
    }


def plan_text(values: Mapping[str, Any]) -> str:
    """Return values as JSON, with each key and each step on a line of its own."""
    lines = []
    for key, value in values.items():
        steps = ",\n  ".join(map(json.dumps, value)) if key == "steps" else ""
        lines.append(f'"{key}": ' + (f"[\n  {steps}\n ]" if steps else json.dumps(value)))
    return "{\n " + ",\n ".join(lines) + "\n}"


def load_plan(plan: Union[str, Plan]) -> Plan:
    """Return a plan with a share and a bucket for each chunk: that of a file, or a plan itself.

    Raises:
        HierAllreduceError: the file cannot be read, or has an unknown key; a key is missing or its value is invalid; or
            the steps are wrong: see :func:`.verify`.
    """
    if isinstance(plan, Plan):
        return _plan(plan_values(plan), f"plan {plan.algorithm!r}")
    path = os.fspath(plan)
    try:
        values = json.loads(Path(path).read_bytes())  # UTF-8, or UTF-16 as PowerShell's `>` writes
    except OSError as cause:
        raise HierAllreduceError(f"plan {path!r} cannot be read: {cause.strerror}") from None
    except (ValueError, RecursionError) as cause:
        raise HierAllreduceError(
            f"plan {path!r} is not JSON, as `hier-allreduce plan MACHINE --json` prints it: {cause}"
        ) from None
    return _plan(values, f"plan {path!r}")


def _plan(values: Any, where: str) -> Plan:
    read = _mapping(_FIELDS)(values, where)
    shares, buckets, towers, lanes = (read[key] for key in ("shares", "buckets", "devices", "lanes"))
    if not shares or abs(sum(shares) - 1) > 1e-6:  # of what is written with six digits
        raise HierAllreduceError(
            f"{where}: shares: expected a share of the bytes for each chunk, 1 in all, not {sum(shares)}"
        )
    if len(buckets) != len(shares) or set(buckets) != set(range(1 + max(buckets))):
        raise HierAllreduceError(
            f"{where}: buckets: expected the bucket of each of {len(shares)} chunks, numbered 0, 1, …"
        )
    plan = Plan(towers * (1 + lanes), len(shares), read["steps"], read["algorithm"], lanes, buckets, shares)
    try:
        return verify(plan)
    except HierAllreduceError as error:
        raise HierAllreduceError(f"{where}: {error}") from None


# ---- keys --------------------------------------------------------------------------------------------


def _mapping(fields: Mapping[str, Field]) -> Reader:
    def read(value: Any, where: str) -> Dict[str, Any]:
        if not isinstance(value, dict):
            raise HierAllreduceError(f"{where}: expected a JSON object, not {value!r}")
        return presets.check(value, fields, where)

    return read


def _whole(least: int) -> Reader:
    def read(value: Any, where: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise HierAllreduceError(f"{where}: expected a whole number of {least} or more, not {value!r}")
        return value

    return read


def _all(reader: Reader) -> Reader:
    def read(value: Any, where: str) -> tuple:
        if not isinstance(value, (list, tuple)):
            raise HierAllreduceError(f"{where}: expected a list, not {value!r}")
        return tuple(reader(item, f"{where}[{number}]") for number, item in enumerate(value))

    return read


def _share(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise HierAllreduceError(f"{where}: expected a share above 0, up to 1, not {value!r}")
    return float(value)


def _format(value: Any, where: str) -> int:
    if value != FORMAT:
        raise HierAllreduceError(
            f"{where}: expected {FORMAT}, not {value!r}: make the plan with this version of hier-allreduce"
        )
    return FORMAT


def _step(value: Any, where: str) -> Step:
    op = value.get("op") if isinstance(value, dict) else None
    if op not in list(_STEPS):
        raise HierAllreduceError(f'{where}: expected an object with "op": "reduce" or "copy", not {value!r}')
    kind, fields = _STEPS[op]
    read = _mapping(fields)(value, where)
    return kind(*(read[field] for field in kind._fields))


def _required(readers: Mapping[str, Reader]) -> Dict[str, Field]:
    return {key: Field(reader, "see docs/reference/plan-json.md") for key, reader in readers.items()}


_NUMBER = _whole(0)
_STEPS: Dict[Any, Any] = {
    "reduce": (Reduce, _required({"op": presets.anything, "chunk": _NUMBER, "srcs": _all(_NUMBER), "dst": _NUMBER})),
    "copy": (Copy, _required({"op": presets.anything, "chunk": _NUMBER, "src": _NUMBER, "dst": _NUMBER})),
}
_FIELDS = {
    **_required({"format": _format, "devices": _whole(1), "lanes": _NUMBER, "algorithm": presets.text_or_nothing}),
    **_required({"shares": _all(_share), "buckets": _all(_NUMBER), "steps": _all(_step)}),
    # of the prediction: they are not read
    **dict.fromkeys(("version", "machine", "bytes", "copies", "sums", "warnings"), Field()),
    **{f"{what}_seconds": Field() for what in ("backward", "exposed", "bound", "idle", "host")},
}
