"""Events from a host's process to the program that launched it: marked lines of JSON on standard output.

::

    host      publish(step=3) ──► <mark>{"step": 3}
    launcher  write("[host 0] <mark>{"step": 3}") ──► read_event(line) == {"step": 3}
"""

from __future__ import annotations

import json
from typing import Any, Dict, Optional

_MARK = "hier_allreduce event: "


def publish(**event: Any) -> None:
    """Print the line that carries an event. Its values are what JSON can hold."""
    print(_MARK + json.dumps(event), flush=True)


def read_event(line: str) -> Optional[Dict[str, Any]]:
    """Return the event in a line that :func:`.launcher.launch` passes on; None if it carries none."""
    _, mark, event = line.partition(_MARK)
    return json.loads(event) if mark else None
