"""tensorpack's replicated training with this package's all-reduce, on any devices.

Importing this module imports tensorpack, which sets environment variables and patches TensorFlow.
"""

from .trainer import HierarchicalTrainer

__all__ = ["HierarchicalTrainer"]
