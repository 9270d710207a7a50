"""Comparisons: our all-reduce with others, measured on this machine.

::

    models ─► case ─► contenders ─► measuring ─► results ─► report
    shapes    K×N     K×N ─► K×N    in turn      ratios,    text
              gradients                          quartiles

``models`` needs no TensorFlow, so this package imports lazily.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .case import ROWS as ROWS
    from .case import Case as Case
    from .case import Rows as Rows
    from .case import consumed as consumed
    from .case import devices_here as devices_here
    from .case import session as session
    from .case import size_case as size_case
    from .case import sweep_sizes as sweep_sizes
    from .case import variables as variables
    from .contenders import Contender as Contender
    from .contenders import all_contenders as all_contenders
    from .contenders import find_contender as find_contender
    from .contenders import ours as ours
    from .contenders import planned_for as planned_for
    from .measuring import BASELINE as BASELINE
    from .measuring import WARM_UP as WARM_UP
    from .measuring import measure as measure
    from .models import DTYPE_BYTES as DTYPE_BYTES
    from .models import GradientShape as GradientShape
    from .models import load_model as load_model
    from .models import table_text as table_text
    from .report import report_text as report_text
    from .report import sizes_text as sizes_text
    from .results import cores as cores

__all__ = [
    "BASELINE",
    "DTYPE_BYTES",
    "ROWS",
    "WARM_UP",
    "Case",
    "Contender",
    "GradientShape",
    "Rows",
    "all_contenders",
    "consumed",
    "cores",
    "devices_here",
    "find_contender",
    "load_model",
    "measure",
    "ours",
    "planned_for",
    "report_text",
    "session",
    "size_case",
    "sizes_text",
    "sweep_sizes",
    "table_text",
    "variables",
]
__getattr__ = lazy(
    __name__,
    {
        "case": [
            "ROWS",
            "Case",
            "Rows",
            "consumed",
            "devices_here",
            "session",
            "size_case",
            "sweep_sizes",
            "variables",
        ],
        "contenders": ["Contender", "all_contenders", "find_contender", "ours", "planned_for"],
        "measuring": ["BASELINE", "WARM_UP", "measure"],
        "models": ["DTYPE_BYTES", "GradientShape", "load_model", "table_text"],
        "report": ["report_text", "sizes_text"],
        "results": ["cores"],
    },
)
