"""Several hosts: how they start and end together, and the collectives between them.

::

    TF_CONFIG │ YAML ─► config ─► Cluster ─► session ─► every step
                                     │         ├─ rendezvous, messages, kv_store: compare what all hosts have built
                                     │         └─ watchdog, liveness: an error that names the host, not a hang
                                     ├─► manifest: what this host has built
                                     └─► collectives: one sum for each chunk, across the hosts

``addresses``, ``config``, ``launcher``, ``liveness``, ``polling`` and ``watchdog`` need no TensorFlow, so
this face imports lazily.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .cluster import Cluster as Cluster
    from .launcher import launch as launch

__all__ = ["Cluster", "launch"]
__getattr__ = lazy(__name__, {"cluster": ["Cluster"], "launcher": ["launch"]})
