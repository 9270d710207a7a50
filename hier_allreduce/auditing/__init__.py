"""What ran: planned = executed. ``audit`` is to be read first."""

from __future__ import annotations

from .audit import Audit, audit
from .traffic import Audited

__all__ = ["Audit", "Audited", "audit"]
