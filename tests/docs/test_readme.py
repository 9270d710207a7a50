"""The examples of the README and of the documentation run unchanged and print what they say."""

import re
import runpy
import subprocess
import sys

import pytest
from helpers.demo import FORKED_HOSTS, forked_command
from helpers.forks import Finished, run_forked
from helpers.graphs import IS_TF2
from helpers.project import TOP


def examples(page):
    return re.findall(r"```python\n(.*?)```", (TOP / page).read_text(encoding="utf-8"), re.DOTALL)


README = examples("README.md")
PAGES = (
    "docs/tutorial.md",
    "docs/how-to/tower-code.md",
    "docs/how-to/own-algorithm.md",
    "docs/how-to/tune.md",
    "docs/lanes.md",
)
EXAMPLES = [*README, *(example for page in PAGES for example in examples(page))]


def named(text):
    ways = r"save_shapes|HierarchicalTrainer|TowerOptimizer|HierarchicalAllReduce|topology=|allreduce_grads\w*"
    return re.search(ways, text).group()


@pytest.mark.parametrize("example", EXAMPLES, ids=named)
def test_examples_run_and_print_what_they_say(example, tmp_path):
    if "MirroredStrategy" in example and not IS_TF2:
        pytest.skip("TensorFlow 2 only")
    ran = run_cold(example, tmp_path) if example == README[0] else run_forked(example, folder=tmp_path)
    assert ran.status == 0, ran.err[-3000:]
    prints = [line for line in example.splitlines() if re.search(r"print\(.*#", line)]
    promised = [line.split("#")[1].split(":")[0].strip() for line in prints]
    assert ran.out.split("\n")[: len(promised)] == promised


def run_cold(example, folder):
    """Run an example as people do, in a process that imports everything itself."""
    done = subprocess.run([sys.executable, "-c", example], cwd=str(folder), capture_output=True, timeout=280)
    return Finished(done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.mark.parametrize("accumulates", [False, True])
def test_several_hosts_come_to_the_mean_of_all_their_towers(tmp_path, accumulates):
    """Once in cold processes, as people start hosts; those of other tests are forked."""
    (example, accumulation), code = examples("docs/cluster.md"), "pass"
    if accumulates:
        example, code = re.sub("^train_op = .*\n", accumulation, example, flags=re.MULTILINE), FORKED_HOSTS
        assert accumulation in example
    ran = forked_command(tmp_path, "launch", "-n", "2", "--", sys.executable, "-c", example, code=code)
    assert ran.status == 0, ran.out + ran.err
    assert sorted(line for line in ran.out.splitlines() if line.endswith("[3.5 3.5 3.5]")) == [
        f"[host {task}] [3.5 3.5 3.5]" for task in (0, 1)
    ]


def test_there_is_an_example_of_each_way():
    assert {"HierarchicalAllReduce", "HierarchicalTrainer", "allreduce_grads"} == set(map(named, README))
    assert {"TowerOptimizer", "topology="} <= set(map(named, EXAMPLES))


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_command_below_the_picture_draws_it(page):
    command = runpy.run_path(str(TOP / "docs/generate/figures.py"))["COMMANDS"]["plan-dgx-1v.png"]
    below = f"plan-dgx-1v.png)\n`hier-allreduce {' '.join(command)} --picture"
    assert below in (TOP / page).read_text(encoding="utf-8")


def test_the_readme_is_short():
    assert len((TOP / "README.md").read_text(encoding="utf-8").splitlines()) <= 200
