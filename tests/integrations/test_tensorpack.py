"""The tensorpack strategy: trained like one tower, saved like tensorpack's own trainer, and its errors.

Importing tensorpack changes global state, so that everything runs in child processes: see tensorpack_child.py.
"""

import json

import numpy as np
import pytest
from helpers.forks import run_forked
from helpers.graphs import IS_TF2
from helpers.optimizers import CASES, TWICE

# Each scenario runs once, for all its tests: these are a group, which one worker runs.
scenario = pytest.mark.xdist_group


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


def weights(variables):
    return {name: np.array(value) for name, value in variables.items() if name.split("/")[0] in ("hidden", "out")}


def difference(variables, others):
    """Return the largest difference of the trained variables, which both must have, and of the slots that both have."""
    a, b = weights(variables), weights(others)
    assert {"hidden/W", "hidden/b", "out/W", "out/b"} <= set(a) & set(b)
    return max(np.abs(a[name] - b[name]).max() for name in set(a) & set(b))


def in_towers(variables):
    """Return {name: [tower 0's value, tower 1's, …]} of all variables that towers have a copy of, slots too."""
    copies: dict = {}
    for name, value in sorted(variables.items()):
        if name.startswith("tower"):
            original = name.split("/", 1)[1]
            copies.setdefault(original, [variables[original]]).append(value)
    return copies


def replicas_are_equal(variables):
    copies = in_towers(variables)
    assert copies
    return all(value == values[0] for values in copies.values() for value in values)


# ---- training ----------------------------------------------------------------------------------------


@scenario("towers")
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_k_towers_train_like_one_with_the_k_fold_batch(facts, count, optimizer):
    """No rounds of copying between epochs here; and inputs are staged though the process has a pool of one thread."""
    run = facts[f"{count} {optimizer}"]
    assert difference(run["many"], run["one"]) < 1e-6
    assert count == 1 or replicas_are_equal(run["many"])


@scenario("towers")
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_adams_beta_powers_advance_once_a_step(facts, count):
    after = facts[f"{count} adam"]["many"]
    assert after["global_step"] == 12
    assert after["apply_gradients/beta1_power"] == pytest.approx(0.9**13, rel=1e-5)
    assert after["apply_gradients/beta2_power"] == pytest.approx(0.999**13, rel=1e-5)


@scenario("accumulation")
def test_accumulated_gradients_are_applied_every_third_step(facts):
    assert difference(facts["sgd"], facts["plain sgd"]) < 1e-6
    assert replicas_are_equal(facts["sgd"])


@scenario("accumulation")
def test_accumulated_adam_is_adam(facts):
    assert difference(facts["adam"], facts["one adam"]) < 1e-6
    assert replicas_are_equal(facts["adam"])
    counters = [value for name, value in facts["adam"].items() if name.endswith("counter")]
    powers = [value for name, value in facts["adam"].items() if name.endswith("beta2_power")]
    assert counters == [9, 9, 9]
    assert powers == [pytest.approx(0.999**4, rel=1e-5)]


@scenario("accumulation")
def test_own_towers_accumulate_in_order_or_not_at_all(facts):
    assert facts["own towers"] == [[value] * 3 for value in (0, 2, 2, 4, 4, 6)]
    assert facts["restored"] == [[value] * 3 for value in (1, 1, 3, 3, 5, 5)]
    assert "AccumGradOptimizer reads its counter while" in facts["unordered"]
    assert "OrderedAccumGrad" in facts["unordered"]


# ---- optimizers ----------------------------------------------------------------------------------------


@scenario("optimizers")
@pytest.mark.parametrize("update", ["replicated", "main"])
@pytest.mark.parametrize("name", [*CASES, "processor with a variable"])
def test_optimizers_train_like_one_tower_or_the_error_says_why_not(facts, name, update):
    words = CASES.get(name, ["", TWICE, ""])[1 + (update == "main")]
    many = facts[f"{name}, {update}"]
    if words:
        assert words in many
    else:
        assert difference(many, facts[f"{name}, one"]) < 1e-6
        assert replicas_are_equal(many)


# ---- updates at the mains ----------------------------------------------------------------------------


@scenario("updates")
@pytest.mark.parametrize("optimizer", ["momentum", "adam", "clip", "accumulate adam"])
def test_updates_at_the_mains_train_like_one_tower(facts, optimizer):
    run = facts[optimizer]
    assert difference(run["many"], run["one"]) < 1e-6
    assert replicas_are_equal(run["many"])
    assert run["drift"] and not any(run["drift"])


@scenario("updates")
def test_slots_at_the_mains_are_saved_as_tower_0s(facts):
    slots = {f"{layer}/{name}/{slot}" for layer in ("hidden", "out") for name in "Wb" for slot in ("Adam", "Adam_1")}
    assert {name for name in facts["adam"]["many"] if "Adam" in name} == slots
    assert slots | {"apply_gradients/beta2_power"} <= set(facts["saved"])


@scenario("updates")
def test_updates_and_tensorpack_share_checkpoints(facts):
    saved, loaded = facts["saved"], facts["to theirs"]
    assert {name for name in saved if saved[name] != loaded.get(name)} == set()
    saved, loaded = facts["from theirs"]
    assert {name for name in saved if saved[name] != loaded.get(name)} == set()
    assert replicas_are_equal(loaded)


@scenario("updates")
def test_a_period_copies_what_is_not_trained(facts):
    after = facts["every 5"]
    (copied,) = in_towers(after)["average"][1:]
    # copied after the fifth of six steps, so that only the last one is missing
    assert copied != after["average"] and copied > 0.5 * after["average"]


@scenario("updates")
def test_a_file_selects_the_trainer(facts):
    assert difference(facts["from file"], facts["two"]) < 1e-6
    assert list(facts["fewer"]) == ["/cpu:0", "/cpu:1"]  # the file says 8


# ---- what looks at names -----------------------------------------------------------------------------


@scenario("names")
@pytest.mark.parametrize("update", ["replicated", "main"])
@pytest.mark.parametrize("optimizer", ["by name", "accumulated by name", "assigned by name", "moved by slots"])
def test_what_matches_names_sees_tower_0s_in_every_tower(facts, optimizer, update):
    many, one = facts[f"{optimizer}, {update}"], facts[f"{optimizer}, one"]
    assert difference(many["after"], one["after"]) < 1e-6
    assert replicas_are_equal(many["after"])
    assert many["histograms"] == one["histograms"]


@scenario("names")
def test_names_are_tower_0s_inside_of_other_wrappers_too(facts):
    many = facts["wrapped by name, replicated"]["after"]
    assert difference(many, facts["by name, one"]["after"]) < 1e-6
    assert replicas_are_equal(many)


@scenario("names")
def test_sparse_gradients_made_dense_are_scaled(facts):
    many, one = facts["scaled embedding, 3"], facts["scaled embedding, 1"]
    assert difference(many, one) < 1e-6
    assert np.abs(np.subtract(many["embedding"], one["embedding"])).max() < 1e-6
    assert many["embedding"][0] == [1, 1] != many["embedding"][2]
    assert replicas_are_equal(many)


@scenario("names")
@pytest.mark.parametrize("update", ["replicated", "main"])
def test_layers_freeze_by_name_and_summaries_are_made_once(facts, update):
    many = facts[f"by name, {update}"]
    assert many["after"]["hidden/W"] == many["before"]["hidden/W"]
    assert many["after"]["hidden/b"] != many["before"]["hidden/b"]
    assert many["histograms"] == ["out/W-grad", "out/b-grad"]


@scenario("names")
@pytest.mark.parametrize("update", ["replicated", "main"])
def test_a_missing_gradient_can_be_zeros(facts, update):
    """Only tower 1's cost has ``extra`` squared in it: a third of it in the mean over three towers."""
    many = facts[f"missing, {update}"]["after"]
    assert many["extra"] == pytest.approx((1 - 0.1 * 2 / 3) ** 6)
    assert replicas_are_equal(many)
    assert difference(many, facts["nothing missing"]["after"]) < 1e-6


# ---- what is around training -------------------------------------------------------------------------


@scenario("checkpoints")
@pytest.mark.parametrize(("way", "steps"), [("theirs to ours", 4), ("ours to ours", 8), ("ours to theirs", 12)])
@pytest.mark.parametrize("optimizer", ["momentum", "adam", "accumulate adam"])
def test_checkpoints_restore_bit_for_bit(facts, optimizer, way, steps):
    """In both directions between tensorpack's trainer and ours, between different numbers of towers, slots too."""
    run = facts[f"{optimizer}, {way}"]
    saved, loaded = run["saved"], run["loaded"]
    more_towers = {"apply_gradients/AccumGrad_2/counter"}
    assert set(saved) - set(loaded) <= more_towers
    slots = {"momentum": {"Momentum"}, "adam": {"Adam", "Adam_1"}, "accumulate adam": {"Adam", "Adam_1", "AccumGrad"}}
    assert slots[optimizer] <= {name.split("/")[-1] for name in saved if name.startswith("hidden/W")}
    assert saved["global_step"] == steps
    assert [name for name in set(saved) & set(loaded) if saved[name] != loaded[name]] == []
    assert replicas_are_equal(loaded)


@scenario("checkpoints")
@pytest.mark.parametrize(("optimizer", "steps"), [("accumulate adam", 8), ("accumulate inside", 4)])
def test_counters_of_more_towers_start_as_the_saved_one(facts, optimizer, steps):
    loaded = facts[f"{optimizer}, ours to ours"]["loaded"]
    assert [value for name, value in sorted(loaded.items()) if name.endswith("counter")] == [steps] * 3


@scenario("callbacks")
def test_gradient_processors_see_reduced_gradients(facts):
    """Clipping by the global norm gives in each of three towers, two of them on one device, what it gives in one."""
    assert difference(facts["clip"], facts["one clip"]) < 1e-6
    assert replicas_are_equal(facts["clip"])


@scenario("callbacks")
def test_summaries_and_inference_reach_the_monitors(facts):
    monitors = facts["monitors"]
    assert {"cost", "error", "validation_cost", "validation"} <= set(monitors)
    assert any(name.endswith("hidden/W/rms") for name in monitors)
    assert (monitors["epoch_num"], monitors["global_step"]) == (2, 12)


@scenario("callbacks")
def test_the_model_saver_saves_every_epoch(facts):
    assert {"model-6.index", "model-12.index"} <= set(facts["files"])


@scenario("callbacks")
def test_the_sum_is_the_mean_times_k(facts):
    """Also where a FeedInput was given: each tower takes its own batch of it."""
    assert difference(facts["sum"], facts["three times"]) < 1e-6


@scenario("callbacks")
def test_broadcast_every_epoch_copies_what_is_not_trained(facts):
    (with_it,) = in_towers(facts["broadcast True"])["average"][1:]
    assert with_it == facts["broadcast True"]["average"] != 0
    (without,) = in_towers(facts["broadcast False"])["average"][1:]
    assert without != facts["broadcast False"]["average"]


@scenario("warned")
def test_one_warning_says_that_reference_variables_train_wrong(facts):
    (message,) = [text for text in facts["references"] if "reference" in text]
    for words in ("2 of 6", "'first'", "tf.compat.v1.enable_resource_variables()", "use_resource=True"):
        assert words in message
    assert not [text for text in facts["one tower"] + facts["none"] if "reference" in text]


@scenario("warned")
def test_only_what_is_trained_is_compared(facts):
    """Moving averages, which tower 0 alone updates, differ between towers by more than a weight that should not."""
    for update in ("replicated", "main"):
        assert not [text for text in facts[f"average, {update}"] if "differs" in text]
    (message,) = [text for text in facts["average and weight"] if "differs" in text]
    assert "'out/b' differs" in message and "tower 1" in message


@scenario("sessions")
@pytest.mark.parametrize("creator", ["own threads", "adapted"])
def test_ones_own_session_gets_threads_and_devices(facts, creator):
    """It asks for threads enough, but the process has a pool of one; and another trainer had it first."""
    assert difference(facts[creator], facts["one"]) < 1e-6
    assert replicas_are_equal(facts[creator])


@scenario("sessions")
def test_a_configuration_that_was_given_is_left_as_it_was(facts):
    before, after = facts["config"]
    assert before == after


@scenario("sessions")
def test_a_session_of_a_final_graph_restores_a_checkpoint(facts):
    assert difference(facts["finalized"], facts["one"]) == 0


# ---- refusals ----------------------------------------------------------------------------------------


@scenario("refusals")
def test_numbers_of_numpy_are_numbers_of_gpus(facts):
    gpus = ["/gpu:0", "/gpu:1"]
    assert facts["devices"] == {"a count": gpus, "ids": gpus, "an array": gpus}


@scenario("refusals")
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no devices", ["devices is empty"]),
        ("zero GPUs", ["devices=0", "from 1 to 256"]),
        ("too many GPUs", ["devices=1000000000000", "from 1 to 256"]),
        ("mode", ["mode='hierarchical' is tensorpack's", "strategy='hierarchical'"]),
        ("option", ["HierarchicalTrainer: 'strategi' is unknown; did you mean 'strategy'"]),
        ("no list", ["must be a list", "'/gpu:0'"]),
        ("set", ["must be a list"]),
        ("quoted", ["not '0,1'", "number of GPUs", "list of ids such as [0, 1]"]),
        ("quoted id", ["tower 0: '0'", "number of GPUs", "list of ids such as [0, 1]"]),
        ("bool", ["tower 0", "True"]),
        ("negative", ["tower 1", "GPU -1"]),
        ("typing error", ["tower 0", "/gpux:0"]),
        ("algorithm", ["did you mean 'hierarchical'", "tree", "flat"]),
        ("update", ["update='mian'", "'replicated', 'main'"]),
        ("period", ["broadcast=-2"]),
        ("preset", ["did you mean 'chainer'"]),
        ("key", ["slip.yaml: 'devises' is unknown; did you mean 'devices'"]),
        ("change", ["from_config: 'device' is unknown; did you mean 'devices'"]),
        ("groups", ["towers 0 to 3 once"]),
        ("average", ["average='sum'"]),
        ("gpus", ["tower 0: /gpu:0", "tower 7: /gpu:7", "finds 0 GPUs", "There are /cpu:0;"]),
        ("gpu ids", ["tower 0: /gpu:0.", "There are /cpu:0;"]),
        ("own session", ["tower 1: /cpu:1", "There are /cpu:0;"]),
        ("few cpus", ["tower 2: /cpu:2", "There are /cpu:0, /cpu:1;"]),
        ("feed", ["PlaceholderInput", "same batch", "QueueInput"]),
        ("uneven", ["tower 0", "'extra'", "None on towers [0]", "missing='zeros'"]),
        ("unordered inside", ["AccumGradOptimizer reads its counter while", "OrderedAccumGrad"]),
        ("own accumulation", ["OwnAccumulation reads its counter while", "OrderedAccumGrad"]),
        ("distributed", ["Distributed is made for tf.distribute", "tf.compat.v1.train"]),
        (
            "scaled embedding",
            ["tower 0 (/cpu:0), variable 4 ('embedding')", "ScaleGradient", 'strategy=Strategy(sparse="dense")'],
        ),
        ("two staged", ["StagingInput", "QueueInput", "nr_stage=2", "nr_stage=1"]),
        ("one tower, two staged", ["StagingInput", "nr_stage=1"]),
        ("towers' names", ["tower 0", "'tower_user/W'", "rename the scope"]),
        ("lonely", ["tower 0 (/cpu:0) has 4", "tower 1 (/cpu:1) has 5", "not on every tower: extra"]),
    ],
)
def test_a_wrong_choice_is_refused_before_training(facts, case, words):
    kind, message = facts[case]
    assert kind == "HierAllreduceError", message
    for word in words:
        assert word in message


@pytest.mark.skipif(not IS_TF2, reason="TensorFlow 2")
@scenario("refusals")
def test_layers_that_need_keras_2_are_told_how_to_get_it(facts):
    kind, message = facts["keras 3"]
    assert kind == "HierAllreduceError" and "tf_keras" in message and "TF_USE_LEGACY_KERAS=1" in message
