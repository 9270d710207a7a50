"""Predicted all-reduces: of shipped machines and models, and beside published times.

::

    python benchmarks/predictions.py [--json FILE] [--machines NAME …] [--models NAME …]

The first table has milliseconds that are exposed after the backward pass, in the mean over the cases of the cost model:
the plan that is chosen, the rule's, the best of all candidates, and other all-reduces. The second one compares the
simulator with published numbers. Speeds that were taken from a number are marked ``fitted``: its error is small by
construction.
"""

import argparse
import json
import time
from typing import Any, Dict, List, NamedTuple

from hier_allreduce import Strategy, Topology, configs
from hier_allreduce.cli.prediction import dense_gradients
from hier_allreduce.formatting import table
from hier_allreduce.models import load_model
from hier_allreduce.planning import Copy, Gradient, Plan
from hier_allreduce.planning.algorithms import hierarchical, schedules_of
from hier_allreduce.planning.choose import candidates, cases_of, choose, rule
from hier_allreduce.planning.contenders import NCCL, TENSORPACK, exposed_by_others
from hier_allreduce.planning.simulator import Case, exposed
from hier_allreduce.planning.strategy import choices_for
from hier_allreduce.topology import links_of

MODELS = ("resnet50", "bert_base", "vgg16", "mobilenet_v2")
MB, MIB = 1_000_000, 1 << 20
OTHERS = {
    "to one": "ReductionToOneDevice",
    "hier. copy": "HierarchicalCopyAllReduce",
    "tensorpack": TENSORPACK,
    "NCCL": NCCL,
}


# ---- shipped machines and models ---------------------------------------------------------------------


def predict(name: str, model: str) -> Dict[str, Any]:
    """Return the exposed seconds of a model on a machine, and the seconds that the choice took."""
    machine, gradients = Topology.load(name), dense_gradients(load_model(model))
    links = links_of(machine)
    cases = cases_of(sum(gradient.bytes for gradient in gradients), links)
    started = time.perf_counter()
    chosen = choices_for(Strategy(), tuple(gradients), machine)[0]
    planning = time.perf_counter() - started
    best = choose(gradients, links, cases, candidates(links, len(machine)))[0]
    by_rule = rule(gradients, len(machine), links)
    others = exposed_by_others(machine, gradients, cases, with_tensorpack=True)
    return {
        "machine": name,
        "model": model,
        "algorithm": chosen.plan.algorithm,
        "chunk_bytes": chosen.plan.chunk_bytes,
        "chosen": chosen.exposed,
        "rule": mean(exposed(by_rule, links, gradients, cases)),
        "best": best.exposed,
        **{label: mean(others[other]) for label, other in OTHERS.items() if other in others},
        "planning": planning,
    }


def mean(seconds: List[float]) -> float:
    """Return the mean."""
    return sum(seconds) / len(seconds)


def predictions_table(rows: List[Dict[str, Any]]) -> str:
    """Return the rows in milliseconds."""
    columns = ["chosen", "rule", "best", *OTHERS]
    lines: List[List[object]] = [["machine", "model", "algorithm", "MiB", *columns, "chosen/best"]]
    for row in rows:
        numbers = [f"{1e3 * row[column]:.2f}" if column in row else "" for column in columns]
        ratio = f"{row['chosen'] / row['best']:.2f}"
        lines.append(
            [
                row["machine"],
                row["model"],
                row["algorithm"],
                row["chunk_bytes"] // MIB,
                *numbers,
                ratio,
            ]
        )
    return table(lines)


def summary(rows: List[Dict[str, Any]]) -> str:
    """Return the worst ratio, the gain over the rule, and the longest choice."""
    worst = max(rows, key=lambda row: row["chosen"] / row["best"])
    gains = sorted(row["rule"] / row["chosen"] for row in rows)
    slowest = max(rows, key=lambda row: row["planning"])
    return (
        f"chosen/best at most {worst['chosen'] / worst['best']:.2f} ({worst['machine']}, {worst['model']}); "
        f"rule/chosen median {gains[len(gains) // 2]:.2f}, at most {gains[-1]:.2f}; "
        f"the longest choice took {slowest['planning']:.1f} s ({slowest['machine']}, {slowest['model']})"
    )


# ---- published numbers -------------------------------------------------------------------------------


class Anchor(NamedTuple):
    """A published number, and the same as it is predicted."""

    machine: str
    operation: str
    source: str
    published: float
    predicted: float
    unit: str
    fitted: bool = False


def anchors() -> List[Anchor]:
    """Return TensorFlow's all-reduces on a DGX-1, and single copies."""
    packs = [Gradient(51 * MB // 8, 1, "int8", is_flat=True)] * 8
    resnet50 = load_model("resnet50")
    share = 51 * MB / sum(shape.elements for shape in resnet50)
    alone = [Gradient(int(share * shape.elements), 1, "int8", is_flat=True) for shape in resnet50]
    tensorflow = "tf_cnn_benchmarks, hierarchical_copy, 51 MB"
    tartan, blink = "Tartan (Li et al. 2018)", "Blink (Wang et al. 2020)"
    return [
        Anchor("dgx-1p", "two groups, 8 packs", tensorflow, 10, 1e3 * two_groups(packs), "ms"),
        Anchor("dgx-1p", "two groups, 161 tensors", tensorflow, 26, 1e3 * two_groups(alone), "ms"),
        Anchor(
            "dgx-1p", "copy, NV1", tartan, 18.41, copied("dgx-1p", 1, 64 * MIB), "GB/s", fitted=True
        ),
        Anchor("dgx-1p", "copy of 1 MiB, NV1", tartan, 15.78, copied("dgx-1p", 1, MIB), "GB/s"),
        Anchor("dgx-1p", "copy of 64 KiB, NV1", tartan, 4.93, copied("dgx-1p", 1, 65536), "GB/s"),
        Anchor("dgx-1p", "copy, PCIe", tartan, 9.19, copied("dgx-1p", 5, 64 * MIB), "GB/s"),
        Anchor(
            "dgx-1v",
            "copy of 1 GiB, NV1",
            blink,
            22.9,
            copied("dgx-1v", 1, 1024 * MIB),
            "GB/s",
            fitted=True,
        ),
        Anchor(
            "dgx-1v", "copy of 1 GiB, NV2", blink, 45.77, copied("dgx-1v", 3, 1024 * MIB), "GB/s"
        ),
        Anchor("dgx-1v", "copy of 1 MiB, NV1", blink, 15.74, copied("dgx-1v", 1, MIB), "GB/s"),
    ]


def two_groups(gradients: List[Gradient]) -> float:
    """Return the seconds of two groups on an idle DGX-1 with P100, each gradient alone."""
    plan = Plan(8, schedules_of(hierarchical, 8), 0, "hierarchical")
    return idle(plan, "dgx-1p", gradients)


def copied(machine: str, dst: int, size: int) -> float:
    """Return the GB/s of a copy from GPU0."""
    plan = Plan(len(Topology.load(machine)), ((Copy(0, dst),),), 0, "copy")
    return size / 1e9 / idle(plan, machine, [Gradient(size, 1, "int8", is_flat=True)], dispatch=0.0)


def idle(plan: Plan, machine: str, gradients: List[Gradient], dispatch: float = 4e-6) -> float:
    """Return the seconds of a plan without a backward pass."""
    case = Case(dispatch, backward=1e-9, lead=0.0)
    return exposed(plan, links_of(Topology.load(machine)), gradients, [case])[0]


def anchors_table(rows: List[Anchor]) -> str:
    """Return published and predicted numbers, and the error."""
    lines: List[List[object]] = [
        ["machine", "operation", "published", "predicted", "error", "source"]
    ]
    for row in rows:
        error = f"{100 * (row.predicted / row.published - 1):+.0f}%" + (
            " fitted" if row.fitted else ""
        )
        numbers = [f"{row.published:g} {row.unit}", f"{row.predicted:.3g} {row.unit}", error]
        lines.append([row.machine, row.operation, *numbers, row.source])
    return table(lines)


def main() -> None:
    """Print both tables; with ``--json`` write their numbers."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--machines", nargs="+", default=configs.names("machines"), help="presets or files"
    )
    parser.add_argument("--models", nargs="+", default=MODELS, help="presets or files")
    parser.add_argument("--json", metavar="FILE", help="write seconds to a file")
    options = parser.parse_args()
    rows = [predict(machine, model) for machine in options.machines for model in options.models]
    published = anchors()
    print(f"{predictions_table(rows)}\n\n{summary(rows)}\n\n{anchors_table(published)}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(
                {"predictions": rows, "published": [row._asdict() for row in published]},
                file,
                indent=1,
            )


if __name__ == "__main__":
    main()
