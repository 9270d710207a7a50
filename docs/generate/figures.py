"""``make figures``: the pictures that README and the site show, drawn again by the commands that people use."""

import subprocess
import sys
from pathlib import Path

FIGURES = Path(__file__).parents[1] / "figures"
COMMANDS = {
    "topo-dgx-1v.png": ("topo", "dgx-1v"),
    "topo-pcie-pairs.png": ("topo", "pcie-pairs"),
    "plan-dgx-1v.png": ("plan", "dgx-1v", "--backlog", "0"),
    "plan-hosts.png": ("plan", "dgx-1v", "--hosts", "8", "--network", "10gbe"),
}


def main():
    """Draw all pictures, or those that the arguments name."""
    for name in sys.argv[1:] or COMMANDS:
        command = [sys.executable, "-m", "hier_allreduce.cli", *COMMANDS[name], "--picture", str(FIGURES / name)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        print(FIGURES / name)


if __name__ == "__main__":
    main()
