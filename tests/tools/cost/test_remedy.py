"""Which remedy a step's line ends with: traces of three GPUs that are written here by hand.

Each tower makes its gradients, sends each to the root of its chunk, and updates with the sum. A
pass begins at 0, a kernel after it lasts 1 ms, and a copy 2 ms, unless something is planted.
"""

from typing import Any, Dict, NamedTuple, Sequence, Tuple

import pytest
from helpers.traces import built_as, sent, step_of

from hier_allreduce import Copy, Reduce
from hier_allreduce_tools.cost.cost import cost_of

TOWERS = (0, 1, 2)


class Plan(NamedTuple):
    """What is planted, in ms."""

    passes: Sequence[float] = (100, 100, 100)
    roots: Sequence[int] = (0, 1)
    copies: Dict[Tuple[int, int], float] = {}  # noqa: RUF012, by pair, of 1 MB
    launch: Dict[str, float] = {}  # noqa: RUF012, what the processor needs for "grad", "sum", "update"


class Written:
    """A trace that grows."""

    def __init__(self, plan, device):
        self.plan, self.device, self.nodes, self.ran = plan, device, [], []

    def op(self, tower, label, scheduled, ms=1):
        """Let an op run when its inputs are there, and return its end."""
        name = label.split(" = ")[0]
        word = next((word for word in self.plan.launch if word in name), "")
        begin = scheduled + self.plan.launch.get(word, 0)
        self.nodes.append((f"{self.device}:{tower}", label, scheduled, begin - 0.01, begin + ms))
        self.ran.append((f"{tower}/stream:13", f"{name}:Op", "", begin, begin + ms))
        return begin + ms

    def copy(self, src, dst, name, begin):
        """Copy a result to another tower, and return the time when it is there."""
        end = begin + self.plan.copies.get((src, dst), 2)
        sent = f"{name}/_{2 * dst}:_Send"
        self.ran.append((f"{src}/stream:16", sent, "MemcpyP2P size:1000000", begin, end))
        return end


def cost_with(device="GPU", **planted):
    """Return the cost of a step."""
    plan = Plan(**planted)
    written = Written(plan, device)
    is_gpu = device == "GPU"
    ends = []
    for k in TOWERS:
        begun = written.op(k, f"first{k} = Fill()", 0)
        ends.append(written.op(k, f"grad{k} = Mul(first{k})", begun, plan.passes[k] - begun))
    tensors = []
    for number, root in enumerate(plan.roots):
        others = [k for k in TOWERS if k != root]
        arrivals = {}
        for k in others:
            arrivals[k] = written.copy(k, root, f"grad{k}", ends[k]) if is_gpu else ends[k]
        total = f"hier_allreduce/v{number}/sum"
        read = [f"grad{k}" if k == root else f"grad{k}/_{2 * root + 1}" for k in TOWERS]
        there = max([ends[root], *arrivals.values()])
        done = written.op(root, f"{total} = AddN({', '.join(read)})", there)
        for k in TOWERS:
            value = total if k == root else f"{total}/_{2 * k + 1}"
            there = written.copy(root, k, total, done) if is_gpu and k != root else done
            written.op(k, f"update{number}_{k} = ResourceApplyGradientDescent({value})", there)
        schedule = [Reduce(tuple(others), root), *(Copy(root, k) for k in others)]
        tensors.append(sent(f"v{number}", schedule, 250_000))
    devices = tuple(f"/{device.lower()}:{k}" for k in TOWERS)
    built = built_as("hier_allreduce/", devices, tensors)
    return cost_of(step_of(written.nodes, written.ran if is_gpu else ()), [built])


def test_an_even_step_has_no_remedy():
    assert cost_with().remedy == ""


# Which tower ends last is chance, and says nothing of whose pass was late.
@pytest.mark.parametrize("ends_last", [(0, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("device", ["GPU", "CPU"])
def test_a_late_pass_is_named_whichever_tower_ends_last(device, ends_last):
    late = cost_with(device, passes=(100, 101, 340), copies={ends_last: 4})
    assert late.remedy.startswith(f"{device} 2 ends its pass 240 ms after the others")
    assert late.summary.endswith(late.remedy)
    assert late.towers[0].before["waiting for other towers"] == pytest.approx(240, abs=0.1)
    assert late.pass_end == pytest.approx(340, abs=0.1) and sum(late.last.after.values()) < 12
    assert f"after the pass {late.step - 340:.1f} ms" in late.summary


def test_a_late_pass_is_named_before_a_slow_link():
    both = cost_with(passes=(100, 140, 100), copies={(0, 2): 80})
    assert both.remedy.startswith("GPU 1 ends its pass 40 ms after the others")


def test_on_cpu_devices_there_is_no_word_of_copies():
    late = cost_with("CPU", passes=(100, 100, 340), roots=(2, 2))
    assert "cop" not in str(late) and late.links == ()
    assert "waiting for other towers" in late.summary


def test_a_slow_link_is_named_if_it_was_waited_for():
    slow = cost_with(copies={(1, 0): 20})
    assert slow.remedy.startswith("The copies from GPU 1 to GPU 0 reach 0.05 GB/s, others 0.5 GB/s")
    assert "waiting for other towers" in slow.summary
    assert cost_with(copies={(1, 0): 3}).remedy == ""


def test_who_waited_for_the_processor_is_told():
    for word, ms in (("sum", 6), ("update", 7)):
        late = cost_with(launch={word: 6})
        words = f"The kernels after the pass waited {ms} ms for the processor: fewer variables"
        assert late.remedy.startswith(words)
    in_pass = cost_with(launch={"grad": 30})
    assert in_pass.remedy.startswith("The pass waited 30 ms for the processor, which launches its")
    assert cost_with(launch={"sum": 2}).remedy == ""


def test_the_longest_wait_decides():
    planted: Dict[str, Any] = {"copies": {(1, 0): 20}, "launch": {"update": 6}}
    assert cost_with(**planted).remedy.startswith("The copies from GPU 1 to GPU 0")
    planted["launch"] = {"update": 40}
    assert cost_with(**planted).remedy.startswith("The kernels after the pass waited 41 ms")


def test_the_threads_of_cpu_devices_are_no_processor_that_could_be_late():
    assert cost_with("CPU", launch={"sum": 50}).remedy == ""
