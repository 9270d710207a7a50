"""``make figures``: the pictures of predicted plans that README and the site show, drawn again."""

import subprocess
import sys
from pathlib import Path

FIGURES = Path(__file__).parents[1] / "figures"
MACHINES = ("dgx-1v", "pcie-pairs")


def main():
    """Draw all pictures, or those of the machines that the arguments name."""
    for machine in sys.argv[1:] or MACHINES:
        picture = FIGURES / f"plan-{machine}.png"
        command = [
            sys.executable,
            "-m",
            "hier_allreduce",
            "plan",
            machine,
            "--model",
            "resnet50",
            "--picture",
            picture,
        ]
        subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
        print(picture)


if __name__ == "__main__":
    main()
