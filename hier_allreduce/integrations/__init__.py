"""tensorpack, ``tf.distribute``, and several hosts: three public modules. Import the one that you need.

::

    integrations.tensorpack   HierarchicalTrainer          imports tensorpack, which changes TensorFlow's globals
    integrations.distribute   HierarchicalAllReduce        for tf.distribute.MirroredStrategy and Keras
    integrations.cluster      HierarchicalClusterTrainer   tensorpack on several hosts
"""

__all__ = ["cluster", "distribute", "tensorpack"]
