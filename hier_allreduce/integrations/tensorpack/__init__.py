"""tensorpack's replicated training with this package's all-reduce, on any devices.

::

    from hier_allreduce.integrations.tensorpack import HierarchicalTrainer

    launch_train_with_config(config, HierarchicalTrainer(8))                       # GPUs 0 to 7
    launch_train_with_config(config, HierarchicalTrainer(["/cpu:0", "/cpu:1"]))    # any devices
    launch_train_with_config(config, HierarchicalTrainer.from_config("chainer"))   # all options from a file

Importing this module imports tensorpack, which sets environment variables and patches TensorFlow.
"""

from __future__ import annotations

from ..._lazy import require

require("tensorpack", __name__)  # before the imports below, which need it

from .accumulation import OrderedAccumGrad  # noqa: E402
from .trainer import HierarchicalTrainer  # noqa: E402

__all__ = ["HierarchicalTrainer", "OrderedAccumGrad"]
