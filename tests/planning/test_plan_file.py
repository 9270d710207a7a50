"""Plans as files: they come back as they were, and what is wrong in one is named by its key."""

import json

import pytest

from hier_allreduce import HierAllreduceError, Plan, Reduce, Strategy
from hier_allreduce.planning import best_plan, plan_text, plan_values
from hier_allreduce.planning.algorithms import flat, plan_of
from hier_allreduce.topology import load

VALUES = plan_values(plan_of(flat, 2, [0, 1]))
REDUCE = VALUES["steps"][0]


def written(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("machine, lanes", [("dgx-1v", 0), ("p3.8xlarge", 3)])
def test_a_plan_comes_back_from_its_file(tmp_path, machine, lanes):
    plan = best_plan(load(machine), 10**8, lanes=lanes).plan
    text = plan_text(plan_values(plan))
    assert Strategy(plan=written(tmp_path, text)).given_plan() == Strategy(plan=plan).given_plan() == plan
    assert len(text.splitlines()) > len(plan.steps)  # one may edit a line


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"format": 2}, "format: expected 1, not 2: make the plan with this version"),
        ({"device": 2}, "'device' is unknown; did you mean 'devices'"),
        ({"devices": 0}, "devices: expected a whole number of 1 or more, not 0"),
        ({"devices": True}, "devices: expected a whole number"),
        ({"devices": 3}, r"chunk 0, step 2 of 2, Copy.* device 0 misses \[2\]"),
        ({"lanes": -1}, "lanes: expected a whole number of 0 or more, not -1"),
        ({"algorithm": 7}, "algorithm: expected a name"),
        ({"shares": 0.5}, "shares: expected a list, not 0.5"),
        ({"shares": [0.5, 0]}, r"shares\[1\]: expected a share above 0, up to 1, not 0"),
        ({"shares": [0.5, 0.4]}, "shares: expected a share of the bytes for each chunk, 1 in all, not 0.9"),
        ({"shares": []}, "shares: expected a share"),
        ({"shares": [float("nan"), 0.5]}, r"shares\[0\]: expected a share"),
        ({"buckets": [0]}, "buckets: expected the bucket of each of 2 chunks"),
        ({"buckets": [0, 2]}, "buckets: expected the bucket of each of 2 chunks, numbered 0, 1"),
        ({"steps": [7]}, r'steps\[0\]: expected an object with "op": "reduce" or "copy", not 7'),
        ({"steps": [{**REDUCE, "op": []}]}, r"steps\[0\]: expected an object"),
        ({"steps": [REDUCE, {**REDUCE, "src": 1}]}, r"steps\[1\]: 'src' is unknown"),
        ({"steps": [{**REDUCE, "srcs": 1}]}, r"steps\[0\]: srcs: expected a list, not 1"),
        ({"steps": [{**REDUCE, "srcs": [1.0]}]}, r"steps\[0\]: srcs\[0\]: expected a whole number"),
        ({"steps": [{"op": "copy", "chunk": 0, "src": 0}]}, r"steps\[0\]: dst is missing: see docs/reference"),
        ({"steps": [{**REDUCE, "chunk": 2}]}, ".*: there are chunks 0 to 1 only"),
        ({"steps": [REDUCE]}, r"chunk 0, after the last step 1, .*: device 1 misses \[0\]"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, changed, message):
    path = written(tmp_path, plan_text({**VALUES, **changed}))
    with pytest.raises(HierAllreduceError, match=f"^plan '.*plan.json': {message}"):
        Strategy(plan=path)


@pytest.mark.parametrize("key", VALUES)
def test_every_key_that_makes_a_plan_is_required(tmp_path, key):
    values = {name: value for name, value in VALUES.items() if name != key}
    with pytest.raises(HierAllreduceError, match=f"{key} is missing"):
        Strategy(plan=written(tmp_path, json.dumps(values)))


@pytest.mark.parametrize("text", ["", "[" * 10**5, "{1}", "algorithm: flat"])
def test_other_files_are_refused(tmp_path, text):
    with pytest.raises(HierAllreduceError, match=r"plan\.json' is not JSON, as `hier-allreduce plan MACHINE --json`"):
        Strategy(plan=written(tmp_path, text))
    with pytest.raises(HierAllreduceError, match=r"none\.json' cannot be read: No such file"):
        Strategy(plan=str(tmp_path / "none.json"))


def test_the_plan_decides_what_other_fields_would():
    plan = plan_of(flat, 2, [0, 1])
    for field, value in {"algorithm": "tree", "topology": "dgx-1v", "mains": 0, "splits": 2}.items():
        with pytest.raises(HierAllreduceError, match=f"{field}={value!r}: the plan decides this; leave it out"):
            Strategy(plan=plan, **{field: value})
    with pytest.raises(HierAllreduceError, match="plan=7: expected a Plan, or the path"):
        Strategy(plan=7)
    with pytest.raises(HierAllreduceError, match="after the last step 1"):
        Strategy(plan=Plan(2, 1, (Reduce(0, (1,), 0),)))
