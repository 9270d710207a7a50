"""A prediction as text for people, and as values for programs.

Numbers have two digits, and differences below 2 % of a step are "about the same": nothing is finer than it is true.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from typing import Any, Dict, List, Sequence, Tuple

from ..formatting import count, duration, rate, rounded, table
from ..planning.chunks import ready
from ..planning.contenders import NCCL, USABLE
from ..planning.plan import Copy
from ..topology import Links, Topology, links_of, nvlinks
from ..topology.matrix import distance
from .prediction import Prediction

LEAST_GAIN = 0.02  # of a step; smaller differences are about the same
_MOST_ROWS = 5  # of links
_WIDTH = 110
_PATHS = {
    "PIX": "one switch",
    "PXB": "switches",
    "PHB": "one CPU",
    "NODE": "one socket",
    "SYS": "between sockets",
}


def report(prediction: Prediction) -> str:
    """Return the links, warnings, rows, a verdict and footnotes."""
    machine, training = prediction.machine, prediction.training
    head = ", ".join(filter(None, (f"{machine.name}: {len(machine)} GPUs", machine.gpu)))
    links = table(("", *row) for row in link_rows(machine))
    warnings = [f"warning: {warning}" for warning in machine.warnings]
    times = f"on one GPU a step of {duration(training.step)}, {duration(training.backward)} of it the backward pass"
    sections = [
        "\n".join([f"{head}; links, in each direction:", links, *warnings]),
        f"{training.model}, {times} ({training.notes})",
        _rows(prediction),
        verdict(prediction),
        _footnotes(prediction),
    ]
    return "\n\n".join(sections)


# ---- links -------------------------------------------------------------------------------------------


def link_rows(machine: Topology) -> List[Tuple[str, str, str, str]]:
    """Return for each kind of link, the nearest first: its name, pairs, speed, and the limit that they share."""
    links, rows = links_of(machine), []
    kinds = sorted({machine.kinds[src][dst] for src, dst in links.ways}, key=distance)
    for group in filter(
        None, [*([kind] for kind in kinds[: _MOST_ROWS - 1]), kinds[_MOST_ROWS - 1 :]]
    ):
        pairs = [(src, dst) for src, dst in links.ways if machine.kinds[src][dst] in group]
        speeds = sorted(links.ways[pair].bandwidth for pair in pairs)
        staged = sum(machine.is_staged(*pair) for pair in pairs)
        access = (
            ""
            if not staged
            else "no peer access"
            if staged == len(pairs)
            else "some have no peer access"
        )
        limit = "; ".join(filter(None, (access, _limit(links, pairs))))
        speed = _range(rate(speeds[0]), rate(speeds[-1]))
        rows.append(
            (
                _range(_named(group[0]), _named(group[-1])),
                count(len(pairs) // 2, "pair"),
                speed,
                limit,
            )
        )
    return rows


def _named(kind: str) -> str:
    return f"{kind} ({_PATHS.get(kind) or count(nvlinks(kind), 'NVLink')})"


def _range(first: str, last: str) -> str:
    """Return ``2–5 ms`` for ``2 ms`` and ``5 ms``."""
    number, _, unit = first.partition(" ")
    return first if first == last else f"{number if last.endswith(f' {unit}') else first}–{last}"


def _limit(links: Links, pairs: Sequence[Tuple[int, int]]) -> str:
    """Return the resource of which the least is left if all these links are busy."""
    crowd = Counter(resource for pair in pairs for resource, _ in links.ways[pair].shared)
    if not crowd:
        return ""
    name, speed = min(
        (speed / crowd[number], name, speed)
        for number, (name, speed) in enumerate(links.resources)
        if crowd[number]
    )[1:]
    if name == "host":
        whose = "all copies share the host's memory"
    elif "+" in name:
        devices = name.partition(" ")[0].split("+")
        group = "+".join(devices if len(devices) <= 4 else (devices[0], "…", devices[-1]))
        whose = f"copies out of {group} share an uplink"
    else:
        whose = f"a GPU's copies share its {'port to the NVSwitch' if 'NVSwitch' in name else 'PCIe port'}"
    return f"{whose}, {rate(speed)}"


# ---- rows --------------------------------------------------------------------------------------------


def _rows(prediction: Prediction) -> str:
    """Return a line for each row; the last column says how much longer a step is than ours."""
    step, ours = prediction.training.step, prediction.rows[0]
    lines: List[Tuple[str, ...]] = [
        ("predicted", "step", "exposed", "", "scaling efficiency", "beside ours")
    ]
    for row in prediction.rows:
        name = f"{row.name}: {row.details}" if row.details else row.name
        efficiency = f"{rounded(100 * step / (step + row.exposed))} %"
        more = 100 * (row.exposed - ours.exposed) / (step + ours.exposed)
        beside = (
            "about the same" if abs(more) < 100 * LEAST_GAIN else f"{float(f'{more:.2g}'):+g} %"
        )
        least_to_most = f"({_range(duration(row.low), duration(row.high))})"
        cells = (
            name,
            duration(step + row.exposed),
            duration(row.exposed),
            least_to_most,
            efficiency,
        )
        lines.append((*cells, "" if row is ours else beside))
    return table(lines)


def verdict(prediction: Prediction) -> str:
    """Return a sentence about ours beside the best that this user can use."""
    step, ours = prediction.training.step, prediction.rows[0]
    usable = [row for row in prediction.rows if row.name in USABLE and "wrong" not in row.details]
    best = min(usable, key=lambda row: row.exposed)
    saved = 100 * (best.exposed - ours.exposed) / (step + max(best.exposed, ours.exposed))
    if abs(saved) < 100 * LEAST_GAIN:
        sentence = f"Ours is about the same as {best.name}: keep that."
    elif saved < 0:
        sentence = f"{best.name} saves {rounded(-saved)} % of a step of ours: keep it."
    else:
        sentence = f"Ours saves {rounded(saved)} % of a step of {best.name}."
    as_fast = any(
        row.name == NCCL and row.exposed - ours.exposed < LEAST_GAIN * step
        for row in prediction.rows
    )
    return (
        f"{sentence} Where NCCL works, it is about as fast or faster: keep it."
        if as_fast
        else sentence
    )


def _footnotes(prediction: Prediction) -> str:
    backward = "" if prediction.training.is_timed else "how long the backward pass is, "
    notes = (
        "Exposed: the time that the all-reduce goes on after the backward pass. In brackets its range over values that "
        f"nobody knows before: {backward}how long the host takes for an op, how far it is ahead of the GPUs, and when "
        "each gradient is ready. Nothing here was measured: `hier-allreduce tune` measures steps."
    )
    return textwrap.fill(notes, _WIDTH, break_on_hyphens=False)


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
                **{
                    "name": row.name,
                    "exposed_seconds": row.exposed,
                    "exposed_low": row.low,
                    "exposed_high": row.high,
                },
                "step_seconds": training.step + row.exposed,
            }
            for row in prediction.rows
        ],
        "plan": {
            **{"algorithm": plan.algorithm, "towers": plan.towers, "chunk_bytes": plan.chunk_bytes},
            "schedules": [
                [
                    ["copy" if isinstance(step, Copy) else "reduce", list(step.srcs), step.dst]
                    for step in schedule
                ]
                for schedule in plan.schedules
            ],
        },
        "chunks": [
            {"bytes": chunk.bytes, "ready": share}
            for chunk, share in zip(prediction.chunks, shares)
        ],
        "ops": prediction.ops,
    }
