"""Events from a host's process to the program that launched it: marked lines of JSON on standard output.

::

    host      publish(step=3) ──► <mark>{"step": 3}
    launcher  write("[host 0] <mark>{"step": 3}") ──► read_event(line) == {"step": 3}
"""

from __future__ import annotations

import json
from typing import Any, Dict, Optional

_MARK = "hier_allreduce event: "


def event_line(**event: Any) -> str:
    """Return the line that carries an event; its values are what JSON can hold."""
    return _MARK + json.dumps(event)


def publish(**event: Any) -> None:
    """Print an event's line at once."""
    print(event_line(**event), flush=True)


def read_event(line: str) -> Optional[Dict[str, Any]]:
    """Return the event in a line that :func:`.launcher.launch` passes on; None if it carries none."""
    _, mark, event = line.partition(_MARK)
    return json.loads(event) if mark else None
