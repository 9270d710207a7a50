"""The programs on README and on the pages run unchanged, and print what they say.

A program is a block of ``python``; ``py`` is a piece of one, which needs lines of the reader's.
"""

import re

import pytest
from helpers.forks import run_forked
from helpers.graphs import IS_TF2
from helpers.project import TOP


def programs(page):
    return re.findall(r"```python\n(.*?)```", (TOP / page).read_text(encoding="utf-8"), re.DOTALL)


README = programs("README.md")
PAGES = (
    "docs/index.md",
    "docs/tutorial.md",
    "docs/how-to/hangs-or-slow.md",
    "docs/how-to/tensorpack.md",
    "docs/how-to/step-cost.md",
    "docs/how-to/towers.md",
    "docs/how-to/own-algorithm.md",
    "docs/how-to/several-hosts.md",
    "docs/how-to/keras.md",
)
PROGRAMS = [*README, *(program for page in PAGES for program in programs(page))]
CALLBACK = programs("docs/how-to/tensorpack.md")[-1]


def named(text):
    names = (
        r"HierarchicalTrainer|TowerOptimizer|HierarchicalAllReduce|LookAtStep|Clipped|NarrowSGD|algorithm="
        r"|allreduce_grads\w*|HIER_ALLREDUCE_TUNE"
    )
    return re.findall(names, text)[0]


@pytest.mark.parametrize("program", PROGRAMS, ids=named)
def test_programs_print_what_they_say(program, tmp_path):
    words = ("MirroredStrategy", "import keras", "float(reduced")
    if any(word in program for word in words) and not IS_TF2:
        pytest.skip("TensorFlow 2 only")
    ran = run_forked(program, folder=tmp_path)
    assert ran.status == 0, ran.err[-3000:]
    prints = [line for line in program.splitlines() if re.search(r"print\(.*#", line)]
    promised = [line.split("#")[1].split(":")[0].strip() for line in prints]
    printed = ran.out.split("\n")
    begin = printed.index(promised[0]) if promised else 0  # after what a hook has printed
    assert printed[begin : begin + len(promised)] == promised


def test_the_callback_audits_a_step_and_writes_its_timeline(tmp_path):
    (program,) = [program for program in README if "HierarchicalTrainer" in program]
    program = program.replace("TrainConfig(model=", "TrainConfig(callbacks=[LookAtStep()], model=")
    ran = run_forked(f"{CALLBACK}\n{program}", folder=tmp_path)
    assert ran.status == 0, ran.err[-3000:]
    assert "planned = executed" in ran.out + ran.err
    assert "hier_allreduce" in (tmp_path / "timeline.json").read_text(encoding="utf-8")


def test_how_it_works_begins_with_a_right_sum(tmp_path):
    (program,) = programs("docs/how-it-works.md")
    program += """
tf1 = tf.compat.v1
tf1.disable_eager_execution()
devices = [f"/cpu:{k}" for k in range(4)]
grads = [[tf.constant(10.0**k) + n for n in range(3)] for k in range(4)]
with tf1.Session(config=tf1.ConfigProto(device_count={"CPU": 4})) as session:
    print({tuple(map(float, row)) for row in session.run(in_two_pairs(grads, devices))})
"""
    assert run_forked(program, folder=tmp_path).out == "{(1111.0, 1115.0, 1119.0)}\n"
