"""``make figures``: the pictures that README and the site show, drawn again by the commands that people use.

What was measured is not measured again: ``docs/data`` keeps what ``bench peers --json`` wrote.
"""

import json
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1]
FIGURES = DOCS / "figures"
COMMANDS = {
    "topo-dgx-1v.png": ("topo", "dgx-1v"),
    "topo-pcie-pairs.png": ("topo", "pcie-pairs"),
    "plan-dgx-1v.png": ("plan", "dgx-1v", "--backlog", "0"),
    "plan-hosts.png": ("plan", "dgx-1v", "--hosts", "8", "--network", "10gbe"),
}
MEASURED = {"bench-peers.png": "bench-peers.json"}


def draw_measured(picture, data):
    """Draw what ``bench peers --picture`` drew when it wrote these data."""
    from hier_allreduce.bench import Report, draw_report  # here, because they import TensorFlow

    values = json.loads(data.read_text(encoding="utf-8"))
    draw_report(values["model"], Report.from_dict(values), str(picture))
    print(picture)


def main():
    """Draw all pictures, or those that the arguments name."""
    for name in sys.argv[1:] or [*COMMANDS, *MEASURED]:
        if name in MEASURED:
            draw_measured(FIGURES / name, DOCS / "data" / MEASURED[name])
            continue
        command = [sys.executable, "-m", "hier_allreduce.cli", *COMMANDS[name], "--picture", str(FIGURES / name)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        print(FIGURES / name)


if __name__ == "__main__":
    main()
