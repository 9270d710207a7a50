"""The cost model: single steps by hand, TensorFlow's rule against ideal links, and the numbers it was built to give."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from helpers.machines import of_kinds

from hier_allreduce.errors import HierAllreduceError
from hier_allreduce.planning import BackwardPass, idle_bound
from hier_allreduce.planning.algorithms import flat, packed_trees, plan_of, tree, two_group
from hier_allreduce.planning.candidates import candidates
from hier_allreduce.planning.flows import wires
from hier_allreduce.planning.plan import Copy, Plan, Reduce
from hier_allreduce.planning.simulator import predicted_seconds, simulate
from hier_allreduce.planning.spanning_trees import pack
from hier_allreduce.topology import calibrated, load, subset
from hier_allreduce.topology.topology import from_yaml

MB = 10**6
# The DGX-1V with the nominal 25 GB/s a link, no PCIe to speak of, and sums that cost their launch only.
NOMINAL = {"speeds": {"nvlink": 25e9, "memory": 1e15, "dispatch": 0.0}, "links": {"SYS": 1e7}}
CUBE_MESHES = ["dgx-1v", "dgx-1v-azure", "dgx-1v-c", "dgx-1v-d"]


def machine(*rows, **speeds):
    """Rows of kinds, with round numbers: 1 µs to start a copy, 2 µs to launch a sum, 10 GB/s an NVLink."""
    given = {
        "copy_latency": 1e-6,
        "kernel": 2e-6,
        "nvlink": 10e9,
        "memory": 100e9,
        "pcie": 10e9,
        "dispatch": 0.0,
        **speeds,
    }
    return of_kinds(*rows, given={"speeds": given})


TRIANGLE = machine("X NV1 NV2", "NV1 X NV1", "NV2 NV1 X")
STAR = machine(*["PIX " * i + "X " + "PIX " * (3 - i) for i in range(4)])
SOCKETS = machine("X PIX SYS SYS", "PIX X SYS SYS", "SYS SYS X PIX", "SYS SYS PIX X")


def nominal(name):
    return calibrated(load(name), NOMINAL)


def micros(plan, topology, chunks, **how):
    return simulate(plan, topology, chunks, **how).seconds * 1e6


def test_one_copy_takes_its_start_and_its_bytes():
    assert micros(Plan(3, 1, (Copy(0, 0, 1),)), TRIANGLE, [100_000]) == pytest.approx(1 + 10)
    assert micros(Plan(3, 1, (Copy(0, 0, 2),)), TRIANGLE, [100_000]) == pytest.approx(1 + 5)


def test_staged_copies_start_later_and_share_the_hosts_memory():
    far = {"speeds": {"copy_latency": 1e-6, "staged_latency": 4e-6, "pcie": 10e9, "staged": 9.3e9, "dispatch": 0.0}}
    pairs = calibrated(STAR, {**far, "staged": ["PIX"]})
    assert micros(Plan(4, 1, (Copy(0, 0, 1),)), pairs, [93_000]) == pytest.approx(5 + 10)
    assert micros(Plan(4, 2, (Copy(0, 0, 1), Copy(1, 2, 3))), pairs, [93_000] * 2) == pytest.approx(5 + 20)
    assert micros(Plan(4, 2, (Copy(0, 0, 1), Copy(1, 2, 3))), STAR, [93_000] * 2) == pytest.approx(1 + 9.3)


def test_a_sum_waits_for_its_sources_and_for_memory():
    plan = Plan(3, 1, (Reduce(0, (1, 0), 2),))
    assert micros(plan, TRIANGLE, [100_000]) == pytest.approx(11 + 2 + 4 * 1)


def test_a_sender_copies_in_turn_unless_links_are_ideal():
    plan = Plan(3, 2, (Copy(0, 0, 1), Copy(1, 0, 2)))
    assert micros(plan, TRIANGLE, [100_000] * 2) == pytest.approx(11 + 6)
    assert micros(plan, TRIANGLE, [100_000] * 2, ideal_links=True) == pytest.approx(11)


def test_a_receiver_takes_in_several_copies_at_a_time():
    plan = Plan(3, 2, (Copy(0, 0, 1), Copy(1, 2, 1)))
    assert micros(plan, TRIANGLE, [100_000] * 2) == pytest.approx(11)


def test_copies_share_a_port_evenly_and_fully():
    two_into_one = Plan(4, 2, (Copy(0, 0, 1), Copy(1, 2, 1)))
    assert micros(two_into_one, STAR, [100_000, 100_000]) == pytest.approx(1 + 20)
    assert micros(two_into_one, STAR, [100_000, 50_000]) == pytest.approx(1 + 10 + 5)


def test_max_min_fair_rates():
    """Three copies into GPU1's port of 10 GB/s, one of them over a link of 2: it gets 2, the others 4 each."""
    slow = from_yaml(STAR.to_yaml() + "links: {GPU0-GPU1: 2e9}\n")
    links = wires(slow, False)
    pairs = [links.number[src, 1] for src in (0, 2, 3)]
    rates = links.rates(sum(1 << pair for pair in pairs), pairs)
    assert [rates[pair] for pair in pairs] == pytest.approx([2e9, 4e9, 4e9])


def test_an_uplink_is_shared_in_each_direction():
    across = Plan(4, 2, (Copy(0, 0, 2), Copy(1, 1, 3)))
    alone = micros(Plan(4, 1, (Copy(0, 0, 2),)), SOCKETS, [100_000])
    assert micros(across, SOCKETS, [100_000] * 2) == pytest.approx(1 + 2 * 10)
    back = Plan(4, 2, (Copy(0, 0, 2), Copy(1, 3, 1)))
    assert micros(back, SOCKETS, [100_000] * 2) == pytest.approx(alone)


def test_a_copy_waits_for_those_before_it_in_its_bucket():
    plan = Plan(3, 2, (Copy(0, 0, 1), Copy(0, 1, 2), Copy(1, 1, 2)))
    assert micros(plan, TRIANGLE, [100_000] * 2) == pytest.approx(33)
    assert micros(plan, TRIANGLE, [100_000] * 2, ordered=False) == pytest.approx(22)
    assert micros(replace(plan, buckets=(0, 1)), TRIANGLE, [100_000] * 2) == pytest.approx(22)


def test_copies_into_a_tower_wait_for_its_queue():
    """Two buckets, ready after 50 and 100 µs; the host is 30 µs ahead of the kernels."""
    backward = BackwardPass(100e-6, 30e-6)
    plan = Plan(3, 2, (Copy(0, 0, 1), Copy(0, 1, 2), Copy(1, 1, 0)), buckets=(0, 1))
    run = simulate(plan, TRIANGLE, [100_000] * 2, backward=backward)
    starts = {span.step: span.start * 1e6 for span in run.spans}
    # issued at 20 when kernels up to 50 are queued; it ends at 61, when those up to 91 are
    assert starts == pytest.approx({0: 50, 1: 91, 2: 102})
    on_a_lane = Plan(6, 1, (Reduce(0, (0,), 3), Copy(0, 3, 4)), lanes=1)
    assert simulate(on_a_lane, TRIANGLE, [100_000], backward=backward).spans[-1].start * 1e6 < 125


def test_a_copy_waits_for_the_sums_of_both_its_devices():
    added = Plan(3, 1, (Reduce(0, (0,), 1), Copy(0, 1, 2)))
    assert micros(added, TRIANGLE, [100_000]) == pytest.approx(11 + 2 + 3 + 11)
    # device 2 has a sum to make from 6 to 11 µs when the copy to it is issued
    busy = Plan(3, 2, (Reduce(0, (0,), 2), Copy(1, 1, 0), Copy(1, 0, 2)))
    slow = machine("X NV4 NV2", "NV4 X NV4", "NV2 NV4 X", memory=10e9)
    run = simulate(busy, slow, [100_000, 200_000])
    receiver_free = next(span.end for span in run.spans if span.dst == span.device)
    assert next(span.start for span in run.spans if span.step == 2) == pytest.approx(receiver_free)


def test_the_host_delays_each_next_step_and_holds_nothing():
    slow = replace(TRIANGLE, speeds=replace(TRIANGLE.speeds, arrival=50e-6))
    chain = Plan(3, 1, (Copy(0, 0, 1), Copy(0, 1, 2)))
    assert micros(chain, slow, [100_000]) == pytest.approx(11 + 50 + 11 + 50)
    together = Plan(3, 2, (Copy(0, 0, 1), Copy(1, 0, 2)))
    assert micros(together, slow, [100_000] * 2) == pytest.approx(11 + 6 + 50)


def test_the_host_dispatches_one_op_after_another():
    """Of all devices: 5 µs each for a send, what arrives, and a sum."""
    slow = replace(TRIANGLE, speeds=replace(TRIANGLE.speeds, dispatch=5e-6))
    # sends at 0 and 5, arrivals noted at 10 and 15
    assert micros(Plan(3, 2, (Copy(0, 0, 1), Copy(1, 1, 2))), slow, [10] * 2) == pytest.approx(15)
    # the send at 0, its arrival at 5, the sum at 10
    assert micros(Plan(3, 1, (Reduce(0, (0,), 1),)), slow, [10]) == pytest.approx(10 + 2, abs=0.01)


def test_ops_beyond_the_hosts_lead_make_the_pass_longer():
    """Ten copies of 10 µs for the host, 50 µs ahead: 20 ops, of which it has paid 5 when the lead is gone."""
    slow = replace(TRIANGLE, speeds=replace(TRIANGLE.speeds, dispatch=10e-6))
    plan = Plan(3, 10, tuple(Copy(chunk, 0, 1) for chunk in range(10)), buckets=(0,) * 9 + (1,))
    sizes, backward = [1] * 10, BackwardPass(1e-3, 50e-6)
    late = predicted_seconds(plan, slow, sizes, backward) * 1e6
    assert late == pytest.approx(9 * 20 - 50, abs=25)
    assert predicted_seconds(plan, TRIANGLE, sizes, backward) * 1e6 < 25


def test_thousands_of_copies_can_wait_for_one():
    """Copy 0 of device 1 is the last of its copies that is ready; all others follow it."""
    count = 5000
    plan = Plan(3, count, (Copy(0, 0, 1), *(Copy(chunk, 1, 2) for chunk in range(count))))
    assert micros(plan, TRIANGLE, [10] * count) == pytest.approx(1.001 * (1 + count))


def test_a_sum_waits_for_the_sum_before_it_on_its_device():
    """Also if its own source arrives sooner: after 6 µs, where the other takes 11."""
    plan = Plan(3, 1, (Reduce(0, (1,), 2), Reduce(0, (0,), 2)))
    assert micros(plan, TRIANGLE, [100_000]) == pytest.approx(11 + 5 + 5)


def test_link_bytes_are_what_the_plan_moves():
    plan = plan_of(two_group, 8, range(8))
    sizes = [10 * MB + chunk for chunk in range(8)]
    run = simulate(plan, load("dgx-1v"), sizes)
    counted = Counter()
    for step in plan.steps:
        for src in step.srcs if isinstance(step, Reduce) else (step.src,):
            counted[src, step.dst] += sizes[step.chunk]
    assert run.link_bytes == counted


@pytest.mark.parametrize("name", ["dgx-1v", "pcie-sockets", "dgx-a100"])
def test_no_device_does_two_things_on_one_stream(name):
    topology = load(name)
    topology = replace(topology, speeds=replace(topology.speeds, dispatch=0.0))
    run = simulate(plan_of(tree, 8, range(8)), topology, [MB] * 8)
    for device in range(8):
        for copies in (True, False):
            spans = sorted(
                (span.start, span.end) for span in run.spans if span.device == device and (span.dst != device) == copies
            )
            assert all(end <= start + 1e-12 for (_, end), (start, _) in zip(spans, spans[1:]))
    assert run.seconds == max(span.end for span in run.spans)


def test_a_plan_for_another_machine_is_an_error():
    with pytest.raises(HierAllreduceError, match="4 devices and 1 chunks; DGX-1V"):
        simulate(plan_of(flat, 4, [0]), load("dgx-1v"), [1])
    with pytest.raises(HierAllreduceError, match="2 sizes"):
        simulate(plan_of(flat, 8, [0]), load("dgx-1v"), [1, 1])


# ---- the numbers that the model has to give ---------------------------------------------------------


@pytest.mark.parametrize("name", CUBE_MESHES)
def test_trees_reach_28_57_on_every_numbering_of_the_mesh(name):
    packing = pack(nominal(name))
    assert packing.rate == pytest.approx(28.57e9, rel=1e-3)
    assert packing.limit == pytest.approx(28.57e9, rel=1e-3)
    assert pack(nominal(name), ideal_links=True).limit == pytest.approx(85.7e9, rel=2e-3)


@pytest.mark.parametrize("ideal_links, limit", [(False, 18.18e9), (True, 50e9)])
def test_two_groups_can_reach_18_and_with_ideal_links_50(ideal_links, limit):
    topology = nominal("dgx-1v")
    busy = Counter()
    for (src, dst), chunks in plan_of(two_group, 8, range(8)).transfers().items():
        busy[(src, dst) if ideal_links else src] += chunks / 8 / topology.link(src, dst).bandwidth
    assert 1 / max(busy.values()) == pytest.approx(limit, rel=1e-3)


def test_two_groups_reach_16_and_trees_25_gb_a_second():
    topology, size = nominal("dgx-1v"), 100 * MB
    two_groups = simulate(plan_of(two_group, 8, range(8)), topology, [size / 8] * 8, ordered=False)
    assert size / two_groups.seconds == pytest.approx(16.0e9, rel=0.13)
    trees = plan_of(packed_trees(pack(topology), 16), 8, range(16))
    seconds = simulate(trees, topology, [size / 16] * 16, ordered=False).seconds
    assert size / seconds == pytest.approx(25.0e9, rel=0.1)  # which of the best packings, SciPy decides


def test_the_bound_holds_for_every_candidate():
    bridges = str(Path(__file__).parents[1] / "topology" / "nvidia_smi" / "8x-a800-80gb-pcie-sys-pix-nv8-nic2.txt")
    for name in ("dgx-1p", "pcie-sockets", "nvlink-bridges", "p3.8xlarge", bridges):
        topology = load(name)
        for candidate in candidates(topology):
            plan = Plan(len(topology), candidate.chunks, candidate.steps)
            sizes = [MB / candidate.chunks] * candidate.chunks
            assert simulate(plan, topology, sizes).seconds > idle_bound(topology, MB) * 0.999


def test_the_bound_counts_both_senders_into_an_uplink():
    """Two pairs with 40 GB/s inside, and a bus of 10 GB/s between them, of which one copy alone takes 7.7.

    At r bytes/s the two senders of a pair copy r across the bus and 2·r inside:
    1 + (r - 7.7) / (10 - 7.7) + 2·r / 40 ≤ 2 copies at a time.
    """
    rows = ("X NV4 SYS SYS", "NV4 X SYS SYS", "SYS SYS X NV4", "SYS SYS NV4 X")
    first, second = ["GPU0", "GPU1"], ["GPU2", "GPU3"]
    bus = {
        "there": {"speed": 10e9, "copies": dict.fromkeys(first, second)},
        "back": {"speed": 10e9, "copies": dict.fromkeys(second, first)},
    }
    pairs = from_yaml(machine(*rows).to_yaml() + yaml.safe_dump({"shared": bus}))
    assert pairs.link(0, 2).bandwidth == 7.7e9
    assert pack(pairs).limit == pytest.approx((1 + 7.7 / 2.3) / (1 / 2.3 + 1 / 20) * 1e9, rel=2e-3)
    assert pack(pairs, ideal_links=True).limit == pytest.approx(10e9, rel=2e-3)


def test_like_links_have_the_bound_of_reduce_scatter():
    for count in (2, 3, 5, 8, 16):
        topology = subset(load("dgx-2"), range(count))
        speed = topology.link(0, 1).bandwidth
        assert pack(topology).limit == pytest.approx(speed * count / 2 / (count - 1), rel=2e-3)


def test_one_device_has_nothing_to_wait_for():
    topology = subset(load("dgx-2"), [3])
    assert idle_bound(topology, MB) == 0
    assert simulate(Plan(1, 1, ()), topology, [MB]).seconds == 0
