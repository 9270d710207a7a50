"""``make figures``: the pictures that README and the site show, drawn again.

What was measured is not measured again: ``docs/data`` keeps what ``bench peers --json`` wrote.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from hier_allreduce.figures import BLUE, INK, PALE, pyplot, save_picture

DOCS = Path(__file__).parents[1]
FIGURES = DOCS / "figures"
COMMANDS = {
    "topo-dgx-1v.png": ("topo", "dgx-1v"),
    "topo-pcie-pairs.png": ("topo", "pcie-pairs"),
    "plan-dgx-1v.png": ("plan", "dgx-1v", "--backward", "0"),
}
MEASURED = {"bench-peers.png": "bench-peers.json"}
TICKS = (0.5, 1, 2, 5, 10, 20)


def ratios_to_ours(measured):
    """Return for each contender its step times, less the baseline's median, divided by ours of the same round."""
    idle = np.median(measured["baseline"]["step_seconds"])
    net = {  # the floor has no baseline
        contender["name"]: np.array(contender["step_seconds"]) - (0 if contender["name"] == "floor" else idle)
        for contender in measured["contenders"]
    }
    return {name: seconds / net["ours"] for name, seconds in net.items()}


def draw_measured(picture, measured):
    """Draw a bar from ours to each contender: the ratio of their step times, with quartiles, on a logarithmic axis."""
    figure, axes = pyplot().subplots(figsize=(8, 5), constrained_layout=True)
    ratios = ratios_to_ours(measured)
    for place, (name, rounds) in enumerate(ratios.items()):
        low, median, high = np.percentile(rounds, (25, 50, 75))
        axes.barh(place, median - 1, left=1, color=PALE if name == "floor" else BLUE)
        axes.plot((low, high), (place, place), color=INK, linewidth=1.6, solid_capstyle="butt")
        axes.annotate(f"{median:.2f}", (max(high, 1), place), (4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(ratios)), labels=ratios)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(TICKS[0], TICKS[-1])
    axes.set_xticks(TICKS, labels=[f"{tick:g}×" for tick in TICKS])
    axes.minorticks_off()
    axes.axvline(1, color=INK, linewidth=0.8)
    axes.set_xlabel("time that the reduction adds to a step, times ours (dark line: first to third quartile)")
    axes.set_title(
        f"{measured['model']}, {'mean' if measured['average'] else 'sum'} over {len(measured['devices'])} CPU devices\n"
        f"TensorFlow {measured['tensorflow']}, {measured['cores']} cores, {measured['rounds']} rounds",
        fontsize=10,
    )
    axes.spines[["top", "right"]].set_visible(False)
    save_picture(figure, str(picture))


def main():
    """Draw all pictures, or those that the arguments name."""
    for name in sys.argv[1:] or [*COMMANDS, *MEASURED]:
        if name in MEASURED:
            draw_measured(FIGURES / name, json.loads((DOCS / "data" / MEASURED[name]).read_text(encoding="utf-8")))
        else:
            command = [sys.executable, "-m", "hier_allreduce", *COMMANDS[name], "--picture", str(FIGURES / name)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        print(FIGURES / name)


if __name__ == "__main__":
    main()
