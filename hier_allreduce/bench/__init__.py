"""Comparisons: our all-reduce with others, measured on this machine.

::

    models ─► case ─► contenders ─► measuring ─► results ─► report
    shapes    K×N     K×N ─► K×N    interleaved  ratios,    text
              gradients             rounds       quartiles

``models`` needs no TensorFlow, so this package imports lazily.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .case import Case as Case
    from .case import devices_here as devices_here
    from .contenders import Contender as Contender
    from .contenders import all_contenders as all_contenders
    from .contenders import find_contender as find_contender
    from .contenders import ours as ours
    from .contenders import planned_for as planned_for
    from .measuring import WARM_UP as WARM_UP
    from .measuring import measure as measure
    from .models import load_model as load_model
    from .report import report_text as report_text
    from .results import Report as Report
    from .shapes import save_shapes as save_shapes
    from .sizes import size_case as size_case
    from .sizes import sizes_text as sizes_text
    from .sizes import sweep_sizes as sweep_sizes
    from .splitting import split_gpu as split_gpu
    from .splitting import with_logical_gpus as with_logical_gpus
    from .tuned import Tuned as Tuned
    from .tuning import tune as tune

__all__ = [
    "WARM_UP",
    "Case",
    "Contender",
    "Report",
    "Tuned",
    "all_contenders",
    "devices_here",
    "find_contender",
    "load_model",
    "measure",
    "ours",
    "planned_for",
    "report_text",
    "save_shapes",
    "size_case",
    "sizes_text",
    "split_gpu",
    "sweep_sizes",
    "tune",
    "with_logical_gpus",
]
__getattr__ = lazy(
    __name__,
    {
        "case": ["Case", "devices_here"],
        "contenders": [
            "Contender",
            "all_contenders",
            "find_contender",
            "ours",
            "planned_for",
        ],
        "measuring": ["WARM_UP", "measure"],
        "models": ["load_model"],
        "report": ["report_text"],
        "results": ["Report"],
        "sizes": ["size_case", "sizes_text", "sweep_sizes"],
        "shapes": ["save_shapes"],
        "splitting": ["split_gpu", "with_logical_gpus"],
        "tuned": ["Tuned"],
        "tuning": ["tune"],
    },
)
