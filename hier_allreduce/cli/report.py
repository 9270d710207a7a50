"""A prediction as text for people, and as values for programs.

Numbers have two digits, and differences below 2 % of a step are "about the same": nothing is finer than it is true.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from typing import Any, Dict, Iterator, List, Sequence, Tuple

from ..formatting import amount, count, table
from ..planning.choose import LEAST_GAIN
from ..planning.chunks import ready
from ..planning.contenders import NCCL, USABLE
from ..planning.plan import Copy
from ..topology import Links, Topology, links_of
from ..topology.matrix import distance
from .prediction import Prediction, Row, Training

_MOST_ROWS = 5  # of links
_WIDTH = 110


def report(prediction: Prediction) -> str:
    """Return the links, warnings, rows, a verdict and footnotes."""
    machine = prediction.machine
    gpu = f", {machine.gpu}" if machine.gpu and machine.gpu not in machine.name else ""
    warnings = [f"warning: {warning}" for warning in machine.warnings]
    parts = ["\n".join([f"{machine.name}: {count(len(machine), 'GPU')}{gpu}", *_links(machine), *warnings])]
    if len(machine) > 1:
        parts += [training_line(prediction.training), _rows(prediction), verdict(prediction), _footnotes(prediction)]
    else:
        parts.append("one GPU has nothing to reduce")
    return "\n\n".join(parts)


def _links(machine: Topology) -> List[str]:
    rows = [(f"  {kind}", pairs, speed, limit) for kind, pairs, speed, limit in link_rows(machine)]
    return table(rows).splitlines() if rows else []


# ---- links -------------------------------------------------------------------------------------------


def link_rows(machine: Topology) -> List[Tuple[str, str, str, str]]:
    """Return for each kind of link, the nearest first: its name, pairs, speed, and the limit that they share."""
    links = links_of(machine)
    kinds = sorted({machine.kinds[src][dst] for src, dst in links.ways}, key=distance)
    groups = [[kind] for kind in kinds[: _MOST_ROWS - 1]] + (
        [kinds[_MOST_ROWS - 1 :]] if kinds[_MOST_ROWS - 1 :] else []
    )
    rows = []
    for group in groups:
        pairs = [(src, dst) for src, dst in links.ways if machine.kinds[src][dst] in group]
        speeds = sorted(links.ways[pair].bandwidth / 1e9 for pair in pairs)
        name, speed = (
            "–".join(dict.fromkeys(ends))
            for ends in ((group[0], group[-1]), (two_digits(speeds[0]), two_digits(speeds[-1])))
        )
        staged = sum(machine.is_staged(*pair) for pair in pairs)
        access = "" if not staged else "no peer access" if staged == len(pairs) else "some have no peer access"
        limit = "; ".join(filter(None, (access, _limit(links, pairs))))
        rows.append((name, count(len(pairs) // 2, "pair"), f"{speed} GB/s each way", limit))
    return rows


def _limit(links: Links, pairs: Sequence[Tuple[int, int]]) -> str:
    """Return the resource of which the least is left if all these links are busy."""
    crowd = Counter(resource for pair in pairs for resource, _ in links.ways[pair].shared)
    if not crowd:
        return ""
    name, speed = min(
        (speed / crowd[number], name, speed) for number, (name, speed) in enumerate(links.resources) if crowd[number]
    )[1:]
    group = name.rpartition(" ")[0]
    if name == "host":
        whose = "all copies share the host's memory"
    elif "+" in group:
        whose = f"copies out of {_short(group)} share an uplink"
    else:
        whose = f"a GPU's copies share its {'port to the NVSwitch' if 'NVSwitch' in group else 'PCIe port'}"
    return f"{whose}, {two_digits(speed / 1e9)} GB/s"


def _short(group: str) -> str:
    """Return ``GPU0–GPU3`` for four neighbours; else the group's name."""
    labels = group.split("+")
    numbers = [int(label[3:]) for label in labels]
    is_range = len(labels) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{labels[0]}–{labels[-1]}" if is_range else group


# ---- rows --------------------------------------------------------------------------------------------


def training_line(training: Training) -> str:
    """Return the model and the times of its step on one GPU."""
    sparse = f", without {count(training.left_out, 'sparse gradient')}" if training.left_out else ""
    assumed = f" (assumed: {', '.join(training.assumed)})" if training.assumed else ""
    times = f"on one GPU a step of {seconds(training.step)}, its backward pass {seconds(training.backward)}{assumed}"
    return f"{training.model}: {amount(training.bytes)} of gradients{sparse}; {times}"


def _rows(prediction: Prediction) -> str:
    step, ours = prediction.training.step, prediction.rows[0]
    lines = [
        (
            f"{row.name}: {row.details}" if row.details else row.name,
            seconds(step + row.exposed),
            seconds(row.exposed),
            f"({span(row)})",
            f"{two_digits(100 * step / (step + row.exposed))} %",
            "" if row is ours else compared(row, ours, step),
        )
        for row in prediction.rows
    ]
    return table([("predicted", "step", "exposed", "", "scaling efficiency", "beside ours"), *lines])


def compared(row: Row, ours: Row, step: float) -> str:
    """Return how much longer a step is than ours."""
    more = (row.exposed - ours.exposed) / (step + ours.exposed)
    return "about the same" if abs(more) < LEAST_GAIN else f"{'+' if more > 0 else '−'}{two_digits(abs(100 * more))} %"


def verdict(prediction: Prediction) -> str:
    """Return a sentence about ours beside the best that this user can use."""
    step, ours = prediction.training.step, prediction.rows[0]
    usable = [row for row in prediction.rows if row.name in USABLE and "wrong" not in row.details]
    best = min(usable, key=lambda row: row.exposed)
    saved = (best.exposed - ours.exposed) / (step + best.exposed)
    if abs(saved) < LEAST_GAIN:
        sentence = f"Ours is about the same as {best.name}: keep that."
    elif saved < 0:
        sentence = f"{best.name} saves {two_digits(-100 * saved)} % of a step of ours: keep it."
    else:
        sentence = f"Ours saves {two_digits(100 * saved)} % of a step of {best.name}."
    as_fast = any(row.name == NCCL and row.exposed - ours.exposed < LEAST_GAIN * step for row in prediction.rows)
    return f"{sentence} Where NCCL works, it is about as fast or faster: keep it." if as_fast else sentence


def span(row: Row) -> str:
    """Return the range of a row's exposed seconds."""
    low, high = seconds(row.low), seconds(row.high)
    return low if low == high else f"{low}–{high}".replace(" ms–", "–", low.endswith("ms") and high.endswith("ms"))


def _footnotes(prediction: Prediction) -> str:
    notes = (
        "Exposed: for so long the all-reduce goes on after the backward pass. In brackets its range over values that "
        f"are not known: {'; '.join(unknowns(prediction))}. Nothing here was measured: `hier-allreduce tune` measures "
        "steps, `hier-allreduce doctor --measure` copies."
    )
    return textwrap.fill(notes, _WIDTH, break_on_hyphens=False)


def unknowns(prediction: Prediction) -> Iterator[str]:
    """Yield each assumption that differs between the cases, with its values."""
    names = {"dispatch": "an op on the host", "backward": "the backward pass", "lead": "the host's lead over the GPUs"}
    for field, name in names.items():
        values = sorted({getattr(case, field) for case in prediction.cases})
        if len(values) > 1:
            yield f"{name}, {seconds(values[0])} to {seconds(values[-1])}"
    yield "when each gradient is ready"


def seconds(value: float) -> str:
    """Return seconds with two digits: ``92 ms``."""
    if value >= 0.9995:
        return f"{two_digits(value)} s"
    return f"{two_digits(value * 1e3)} ms" if value >= 0.995e-3 else f"{two_digits(value * 1e6)} µs"


def two_digits(value: float) -> str:
    """Return a number rounded to two digits: ``3.7``, ``92``, ``180``."""
    return f"{float(f'{value:.2g}'):g}"


# ---- JSON --------------------------------------------------------------------------------------------


def as_json(prediction: Prediction) -> Dict[str, Any]:
    """Return the values that ``docs/reference/plan-json.md`` describes: seconds and bytes."""
    training, plan = prediction.training, prediction.plan
    shares = ready(prediction.chunks, training.gradients)
    return {
        "machine": prediction.machine.name,
        "model": training.model,
        "step_seconds": training.step,
        "rows": [
            {
                "name": row.name,
                "exposed_seconds": row.exposed,
                "exposed_low": row.low,
                "exposed_high": row.high,
                "step_seconds": training.step + row.exposed,
            }
            for row in prediction.rows
        ],
        "plan": {
            "algorithm": plan.algorithm,
            "towers": plan.towers,
            "chunk_bytes": plan.chunk_bytes,
            "schedules": [
                [["copy" if isinstance(step, Copy) else "reduce", list(step.srcs), step.dst] for step in schedule]
                for schedule in plan.schedules
            ],
        },
        "chunks": [{"bytes": chunk.bytes, "ready": share} for chunk, share in zip(prediction.chunks, shares)],
        "ops": prediction.ops,
    }
