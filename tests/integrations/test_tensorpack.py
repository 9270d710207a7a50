"""HierarchicalTrainer: trained like one tower, saved like tensorpack's own trainer, and its errors.

Importing tensorpack changes global state, so that everything runs in child processes: see tensorpack_child.py.
"""

import json

import numpy as np
import pytest
from helpers.forks import run_forked
from helpers.graphs import IS_TF2

# Each scenario runs once, for all its tests: these are a group, which one worker runs.
scenario = pytest.mark.xdist_group
UPDATES = pytest.mark.parametrize("update", ["replicated", "main"])


@pytest.fixture(scope="module")
def results():
    """The facts of the scenarios that have run, by their names."""
    return {}


@pytest.fixture
def facts(request, results, tmp_path_factory):
    """The facts of the test's scenario, which runs with the first of its tests."""
    name = request.node.get_closest_marker("xdist_group").args[0]
    if name not in results:
        results[name] = run_child(name, tmp_path_factory.mktemp(name))
    assert isinstance(results[name], dict), results[name]
    return results[name]


def run_child(scenario, folder):
    """Return the facts; or what was printed, if the child failed or hung."""
    done = run_forked(
        "import sys; from helpers import tensorpack_child as child; child.main(*sys.argv[1:])",
        scenario,
        str(folder),
        folder=folder,
    )
    return json.loads((folder / "facts.json").read_text()) if done.status == 0 else (done.out + done.err)[-5000:]


def difference(variables, others):
    """Return the largest difference of the trained variables, which both must have, and of the slots that both have."""
    a, b = (
        {name: np.array(value) for name, value in values.items() if name.split("/")[0] in ("hidden", "out")}
        for values in (variables, others)
    )
    assert {"hidden/W", "hidden/b", "out/W", "out/b"} <= set(a) & set(b)
    return max(np.abs(a[name] - b[name]).max() for name in set(a) & set(b))


def replicas_are_equal(variables):
    """Return whether other towers' variables, slots too, are tower 0's."""
    copies = {name: value for name, value in variables.items() if name.startswith("tower")}
    return bool(copies) and all(value == variables[name.split("/", 1)[1]] for name, value in copies.items())


# ---- training ----------------------------------------------------------------------------------------


@scenario("training")
@UPDATES
@pytest.mark.parametrize("optimizer", ["momentum", "adam", "accumulate adam", "clip"])
def test_towers_train_like_one_with_a_larger_batch(facts, optimizer, update):
    """No rounds of copying between epochs here; and inputs are staged though the process has a pool of one thread."""
    many = facts[f"{optimizer}, {update}"]
    assert difference(many, facts[f"{optimizer}, one"]) < 1e-6
    assert replicas_are_equal(many) and many["global_step"] == 12


@scenario("training")
@UPDATES
def test_adams_beta_powers_advance_once_a_step(facts, update):
    assert facts[f"adam, {update}"]["apply_gradients/beta2_power"] == pytest.approx(0.999**13, rel=1e-5)


@scenario("training")
def test_the_sum_is_the_mean_times_k(facts):
    assert difference(facts["eight"], facts["eight times"]) < 1e-5 and replicas_are_equal(facts["eight"])


@scenario("training")
def test_accumulated_gradients_are_applied_every_kth_step(facts):
    assert difference(facts["accumulate sgd"], facts["sgd*3"]) < 1e-6
    assert [value for name, value in facts["accumulate sgd"].items() if name.endswith("counter")] == [9, 9, 9]


@scenario("training")
def test_a_file_selects_the_trainer_and_an_argument_changes_it(facts):
    assert difference(facts["from file"], facts["momentum, one"]) < 1e-6
    assert "tower2/out/b" in facts["from file"] and "tower3/out/b" not in facts["from file"]


@scenario("checkpoints")
@pytest.mark.parametrize(
    ("way", "steps"), [("theirs to ours", 4), ("ours to the mains", 8), ("the mains to theirs", 12)]
)
@pytest.mark.parametrize("optimizer", ["momentum", "adam", "accumulate adam"])
def test_checkpoints_restore_bit_for_bit(facts, optimizer, way, steps):
    """Between tensorpack's trainer and ours, between different numbers of towers and both updates, slots too."""
    saved, loaded = (facts[f"{optimizer}, {way}"][when] for when in ("saved", "loaded"))
    missing = {name for name in set(saved) - set(loaded) if not name.endswith("counter")}  # one for each tower
    slots = {"momentum": {"Momentum"}, "adam": {"Adam", "Adam_1"}, "accumulate adam": {"Adam", "Adam_1", "AccumGrad"}}
    assert not missing and saved["global_step"] == steps
    assert slots[optimizer] <= {name.split("/")[-1] for name in saved if name.startswith("hidden/W")}
    assert [name for name in set(saved) & set(loaded) if saved[name] != loaded[name]] == []
    assert replicas_are_equal(loaded)
    assert all(value == steps for name, value in loaded.items() if name.endswith("counter")) or "theirs" in way[-6:]


@scenario("names")
@UPDATES
@pytest.mark.parametrize("optimizer", ["by name", "assigned by name", "moved by slots"])
def test_matches_of_names_see_tower_0s_in_every_tower(facts, optimizer, update):
    many, one = facts[f"{optimizer}, {update}"], facts[f"{optimizer}, one"]
    assert difference(many["after"], one["after"]) < 1e-6
    assert replicas_are_equal(many["after"])
    if optimizer == "by name":
        assert many["after"]["hidden/W"] == many["before"]["hidden/W"]
        assert many["after"]["hidden/b"] != many["before"]["hidden/b"]
        assert many["histograms"] == ["out/W-grad", "out/b-grad"]


# ---- what is around training -------------------------------------------------------------------------


@scenario("around")
def test_processors_see_reduced_gradients_and_averages_are_copied_every_epoch(facts):
    """In a session of the user with two towers on one device."""
    assert difference(facts["many"], facts["one"]) < 1e-6
    assert replicas_are_equal(facts["many"]) and facts["many"]["average"] != 0
    before, after = facts["config"]
    assert before == after


@scenario("around")
def test_summaries_and_checkpoints_are_made_every_epoch(facts):
    monitors = facts["monitors"]
    assert "cost" in monitors and any(name.endswith("hidden/W/rms") for name in monitors)
    assert (monitors["epoch_num"], monitors["global_step"]) == (2, 12)
    assert monitors["replica_drift"] == 0  # moving averages, which differ within an epoch, are not compared
    assert {"model-6.index", "model-12.index"} <= set(facts["files"])


@scenario("around")
def test_a_period_copies_what_is_not_trained(facts):
    after = facts["every 5"]
    # copied after the fifth of six steps, so that only the last one is missing
    assert after["average"] > after["tower1/average"] > 0.5 * after["average"]


@scenario("around")
def test_warnings_name_drift_and_reference_variables(facts):
    (drift,) = [text for text in facts["warnings"] if "differs" in text]
    assert "'out/b' differs" in drift and "tower 1" in drift
    (references,) = [text for text in facts["warnings"] if "reference" in text]
    for words in ("1 of 5", "'first'", "tf.compat.v1.enable_resource_variables()", "use_resource=True"):
        assert words in references


# ---- refusals ----------------------------------------------------------------------------------------


@scenario("refusals")
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no devices", ["devices is empty"]),
        ("no GPUs", ["devices is empty"]),
        ("no list", ["must be a list", "'0,1'"]),
        ("quoted id", ["tower 0: '0'"]),
        ("algorithm", ["did you mean 'hierarchical'", "tree", "flat"]),
        ("update", ["update='mian'", "'replicated', 'main'"]),
        ("preset", ["did you mean 'chainer'"]),
        ("key", ["slip.yaml: 'devises' is unknown; did you mean 'devices'"]),
        ("gpus", ["tower 0: /gpu:0 does not exist", "CPU:0", 'devices=["/cpu:0", "/cpu:1", …]']),
        ("few cpus", ["tower 2: /cpu:2 does not exist", "CPU:1"]),
        ("feed", ["FeedInput", "same batch", "QueueInput"]),
        ("uneven", ["tower 0", "'extra'", "None on towers [0]", "missing='zeros'"]),
        ("lonely", ["tower 0 (/cpu:0) has 4", "tower 1 (/cpu:1) has 5", "not on every tower: extra"]),
        ("mode", ["mode='hierarchical' is tensorpack's", "strategy='hierarchical'"]),
        ("option", ["'strategi' is unknown; did you mean 'strategy'"]),
        ("two staged", ["StagingInput", "QueueInput", "nr_stage=2", "nr_stage=1"]),
        ("own accumulation", ["OwnAccumulation reads its counter while", "OrderedAccumGrad"]),
        ("processor with a variable", ["both write", "update='main'"]),
    ],
)
def test_a_wrong_choice_is_refused_before_training(facts, case, words):
    for word in words:
        assert word in facts[case]


@pytest.mark.skipif(not IS_TF2, reason="TensorFlow 2")
@scenario("refusals")
def test_layers_that_need_keras_2_are_told_how_to_get_it(facts):
    assert "tf_keras" in facts["keras 3"] and "TF_USE_LEGACY_KERAS=1" in facts["keras 3"]
