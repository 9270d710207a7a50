"""tensorpack and ``tf.distribute``: two public modules, each imported on demand.

::

    integrations.tensorpack   HierarchicalTrainer      imports tensorpack, which changes globals
    integrations.distribute   HierarchicalAllReduce    for tf.distribute.MirroredStrategy and Keras
"""

__all__ = ["distribute", "tensorpack"]
