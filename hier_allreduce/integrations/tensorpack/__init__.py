"""tensorpack's replicated training with this package's all-reduce, on any devices.

Importing this module imports tensorpack, which sets environment variables and patches TensorFlow.
"""

from __future__ import annotations

from ..._lazy import require

require("tensorpack", __name__)  # before the imports below, which need it

from .accumulation import OrderedAccumGrad  # noqa: E402
from .trainer import HierarchicalTrainer  # noqa: E402

__all__ = ["HierarchicalTrainer", "OrderedAccumGrad"]
