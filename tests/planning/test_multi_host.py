"""Several hosts in the planner: the simulation against seconds added up by hand, and what the choice must always be."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hier_allreduce.planning import multi_host as hosts
from hier_allreduce.planning import planner
from hier_allreduce.planning import simulator as cost
from hier_allreduce.planning.algorithms import hierarchical, tree
from hier_allreduce.planning.plan import Copy, Plan, Reduce, verify
from hier_allreduce.planning.recipes import baselines, candidates
from hier_allreduce.topology import flat_host, subset
from hier_allreduce.topology import load as machine
from hier_allreduce.topology.network import Network

MB = 10**6
SLOW = Network(nic=1e9, hop=1e-3, engine=math.inf)  # a collective of 1 MB between 2 hosts: 2 hops and 1 MB, 3 ms
PAIR = flat_host(2)
EXCHANGE = Plan(2, 2, (Reduce(0, (1,), 0), Reduce(1, (0,), 1), Copy(0, 0, 1), Copy(1, 1, 0)))
networks = st.builds(
    Network,
    nic=st.floats(1e8, 1e12),
    hop=st.floats(1e-7, 1e-2),
    nics=st.integers(1, 9),
    engine=st.floats(1e8, 1e12) | st.just(math.inf),
)


def alone(plan, chunks=(MB,), topology=PAIR):
    return cost.simulate(plan, topology, chunks).seconds


def on_hosts(plan, count, network, chunks=(MB,), topology=PAIR):
    return hosts.simulate_on_hosts(plan, topology, chunks, count, network)


def seconds_of_the_plan_for_one_host(topology, size, count, network, algorithm=None):
    recipe = planner.choose(topology, size, algorithm).recipe
    return hosts.simulate_recipe_on_hosts(recipe, topology, size, count, network).seconds


def test_one_chunk_takes_its_sums_its_ring_and_its_copies_one_after_the_other():
    plan = tree(8, [3])
    topology = machine("dgx-1v")
    found = on_hosts(plan, 4, SLOW, topology=topology)
    halves = alone(plan.reduce_half(), topology=topology) + alone(plan.copy_half(), topology=topology)
    assert found.seconds == pytest.approx(halves + 6 * 1e-3 + 1.5e-3)
    (crossing,) = found.crossings
    assert (crossing.chunk, crossing.device, crossing.nic) == (0, 3, 0)
    assert crossing.start == pytest.approx(alone(plan.reduce_half(), topology=topology))


@pytest.mark.parametrize(
    "network, seconds",
    [
        (SLOW, 2 * 3e-3),  # both chunks by the only card
        (SLOW._replace(nics=2), 2e-3 + 3e-3),  # a card for each main, but only one processor for hops
        (SLOW._replace(nics=2, hop=0.0), 1e-3),
        (SLOW._replace(nics=2, hop=0.0, engine=1e9), 2 * 1e-3),  # two cards, and a runtime that fills one
        (SLOW._replace(hop=0.0, engine=0.5e9), 2 * 2e-3),
    ],
)
def test_chunks_share_cards_the_processor_and_what_the_runtime_moves(network, seconds):
    crossings = on_hosts(EXCHANGE, 2, network, (MB, MB)).crossings
    starts, ends = zip(*((crossing.start, crossing.end) for crossing in crossings))
    assert max(ends) - min(starts) == pytest.approx(seconds)


def test_one_device_a_host_has_only_the_ring():
    plan = Plan(1, 1, ())
    assert on_hosts(plan, 4, SLOW, topology=flat_host(1)).seconds == pytest.approx(6e-3 + 1.5e-3)
    choice = hosts.choose_for_hosts(flat_host(1), MB, 4, SLOW)
    assert choice.seconds == pytest.approx(7.5e-3) and choice.recipe.plan().steps == ()


@pytest.mark.parametrize("name", ["dgx-1v", "pcie-sockets", "p3.8xlarge"])
def test_one_host_needs_no_network(name):
    topology = machine(name)
    known = planner.choose(topology, 10 * MB)
    choice = hosts.choose_for_hosts(topology, 10 * MB, 1, SLOW)
    assert (choice.recipe, choice.seconds, choice.bound) == (known.recipe, known.seconds, known.bound)
    assert choice.algorithms == planner.seconds_by_algorithm(topology, 10 * MB)
    assert (choice.across, choice.wire_bound, choice.inside) == (0, 0, known.seconds)


@given(count=st.integers(1, 200), network=networks, chunks=st.integers(1, 9), size=st.integers(1, 10**9))
@settings(max_examples=60, deadline=None)
def test_a_chunk_crosses_once_after_its_sum_and_before_its_copies(count, network, chunks, size):
    plan, topology = hierarchical(5, range(chunks)), subset(machine("dgx-1v"), range(5))
    found = on_hosts(plan, count, network, [size] * chunks, topology)
    assert sorted(crossing.chunk for crossing in found.crossings) == list(range(chunks))
    crossed = {crossing.chunk: crossing for crossing in found.crossings}
    for step, *_, start, end in found.spans:
        crossing = crossed[plan.steps[step].chunk]
        assert crossing.device == plan.roots[crossing.chunk]
        if isinstance(plan.steps[step], Reduce):
            assert end <= crossing.start
        else:
            assert start >= crossing.end
    least = max(
        network.processor_seconds(count, chunks * size, chunks),
        cost.lower_bound(topology, chunks * size),
        network.wire_seconds(count, chunks * size),
    )
    assert found.seconds >= least * (1 - 1e-9)


@given(count=st.integers(2, 128), network=networks, size=st.integers(1, 10**9))
@settings(max_examples=15, deadline=None)
def test_a_choice_is_never_slower_than_what_it_is_compared_with(count, network, size):
    topology = machine("p3.8xlarge")
    choice = hosts.choose_for_hosts(topology, size, count, network)
    verify(choice.recipe.plan())
    assert choice.seconds <= min(choice.algorithms.values()) * (1 + 1e-9)
    assert choice.seconds <= seconds_of_the_plan_for_one_host(topology, size, count, network) * (1 + 1e-9)
    assert set(choice.algorithms) >= set(planner.BASELINES)
    assert max(choice.host_bound, choice.wire_bound) == choice.bound <= choice.seconds * (1 + 1e-9)
    assert choice.before + choice.across <= choice.seconds * (1 + 1e-9)


@pytest.mark.parametrize("network", [Network.load("10gbe"), Network(1e9, 1e-5, 2, 1e10), Network(1e11, 1e-6, 4, 1e12)])
@pytest.mark.parametrize("size", [MB, 30 * MB])
def test_what_is_not_simulated_would_not_have_been_faster(network, size):
    topology, size = machine("p3.8xlarge"), planner.bytes_class(size)
    most = len(planner.choose(topology, size).recipe.fractions)
    tried = [*baselines(topology), *(recipe for recipe in candidates(topology) if len(recipe.fractions) <= most)]
    ordered = [planner.ordered(recipe, topology, size).recipe for recipe in tried]
    fastest = min(hosts.simulate_recipe_on_hosts(recipe, topology, size, 6, network).seconds for recipe in ordered)
    assert hosts.choose_for_hosts(topology, size, 6, network).seconds <= fastest * (1 + 1e-9)


def test_slower_hops_and_more_hosts_make_fewer_chunks():
    topology = machine("dgx-1v")

    def chunks(count, **how):
        return hosts.choose_for_hosts(topology, 100 * MB, count, Network.load("10gbe")._replace(**how)).collectives

    by_hosts = [chunks(count) for count in (1, 2, 4, 8, 16, 32, 64, 128)]
    by_hop = [chunks(4, hop=hop) for hop in (1e-6, 1e-4, 1e-2)]
    for counts in (by_hosts, by_hop):
        assert counts == sorted(counts, reverse=True)
        assert counts[0] > counts[-1] == 1


def test_the_plan_of_one_algorithm():
    topology, network = machine("dgx-1v"), Network.load("10gbe")
    choice = hosts.choose_for_hosts(topology, 100 * MB, 8, network, "ring")
    assert choice.recipe.algorithm == "ring" and choice.seconds == choice.algorithms["ring"]
    assert choice.seconds < seconds_of_the_plan_for_one_host(topology, 100 * MB, 8, network, "ring")
