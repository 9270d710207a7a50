"""tensorpack, ``tf.distribute`` and several hosts: three public modules, each imported on demand.

::

    integrations.tensorpack   HierarchicalTrainer          imports tensorpack, which changes TensorFlow's globals
    integrations.distribute   HierarchicalAllReduce        for tf.distribute.MirroredStrategy and Keras
    integrations.cluster      HierarchicalClusterTrainer   tensorpack on several hosts
"""

from .._lazy import require

__all__ = ["cluster", "distribute", "tensorpack"]

require("tensorflow", __name__)
