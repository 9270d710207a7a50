"""The audit: planned = executed. ``compare`` is to be read first."""

from __future__ import annotations

from .compare import Audit, Audited, audit

__all__ = ["Audit", "Audited", "audit"]
