"""``bench --trace``: a trace of each contender, ours by chunk and a peer's by op."""

import json

import pytest
from helpers.benches import SMALL, case, flat_sum

from hier_allreduce.bench.contenders import Contender, ours
from hier_allreduce.bench.measuring import measure
from hier_allreduce.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    contenders = [ours(name="ours:a/b"), Contender("peer", flat_sum)]
    measure(case(SMALL[:2], 3), contenders, rounds=1, floor=False, traces=str(folder))
    return folder


def test_each_contender_has_a_trace_and_its_summary(folder):
    files = {file.name for file in folder.iterdir()}
    assert files == {f"{name}.{kind}" for name in ("ours-a-b", "peer") for kind in ("json", "txt")}
    named = {}
    for name in ("ours-a-b", "peer"):
        events = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))["traceEvents"]
        named[name] = {event["name"] for event in events if event["ph"] == "X"}
    assert any(name.startswith("c0 ") and " sum on " in name for name in named["ours-a-b"])
    assert {"AddN", "AddN_1"} <= named["peer"]
    assert "exposed" in (folder / "ours-a-b.txt").read_text(encoding="utf-8")


def test_the_folder_is_checked_first(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--trace", str(tmp_path / "nowhere")])
    assert "there is no such folder" in capsys.readouterr().err


def test_a_plan_is_traced_too(tmp_path, capsys):
    assert main(["plan", "p3.8xlarge", "--bytes", "1MB", "--trace", str(tmp_path / "plan.json")]) == 0
    assert "exposed" in capsys.readouterr().out
    assert "traceEvents" in (tmp_path / "plan.json").read_text(encoding="utf-8")
