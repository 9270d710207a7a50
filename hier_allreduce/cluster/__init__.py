"""Several hosts: who they are, how they start and end together, and the collectives between them.

::

    TF_CONFIG │ YAML ─► config ─► Cluster ─► session ─► every step
                                     │         ├─ rendezvous, kv_store: compare graphs before the first step
                                     │         └─ watchdog, liveness: an error that names the host, not a hang
                                     └─► collectives: one sum for each chunk, across the hosts

``config``, ``launcher``, ``liveness`` and ``watchdog`` need no TensorFlow, so this face imports lazily.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .cluster import Cluster as Cluster
    from .config import read_config as read_config
    from .launcher import launch as launch
    from .liveness import free_addresses as free_addresses

__all__ = [
    "Cluster",
    "free_addresses",
    "launch",
    "read_config",
]
__getattr__ = lazy(
    __name__,
    {
        "cluster": ["Cluster"],
        "config": ["read_config"],
        "launcher": ["launch"],
        "liveness": ["free_addresses"],
    },
)
