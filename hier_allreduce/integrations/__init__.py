"""tensorpack and ``tf.distribute``: two public modules, each imported on demand.

::

    integrations.tensorpack   HierarchicalTrainer      imports tensorpack, which changes globals
    integrations.distribute   HierarchicalAllReduce    for tf.distribute.MirroredStrategy and Keras
"""

from .._lazy import require

__all__ = ["distribute", "tensorpack"]

require("tensorflow", __name__)
