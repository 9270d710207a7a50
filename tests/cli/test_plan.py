"""``plan``: the text that people see, the JSON that programs read, and pictures."""

import json
import re
import sys

import pytest

from hier_allreduce import Copy, Reduce, Topology, check, presets

TABLE = "\tGPU0\tGPU1\tGPU2\nGPU0\t X \tNV2\tPIX\nGPU1\tNV2\t X \tPIX\nGPU2\tPIX\tPIX\t X \n"
BOX = (
    "|   0  NVIDIA GeForce RTX 3090        Off |   00000000:01:00.0 Off |                  N/A |\n"
)
OTHERS = ["ReductionToOneDevice", "HierarchicalCopyAllReduce"]


@pytest.fixture
def values(run):
    """``values("dgx-1v", …)``: the JSON object of ``plan``."""

    def values(*arguments, stdin=""):
        status, out, _ = run("plan", *arguments, "--json", stdin=stdin)
        assert status == 0 and out.count("\n") == 1
        return json.loads(out)

    return values


def rows_of(text):
    """The table's rows by name: step, exposed, range, efficiency, beside ours."""
    table = text.split("\n\n")[2].splitlines()
    columns = [match.start() for match in re.finditer(r"\S+( \S+)?", table[0])]
    return {
        line[: columns[1] - 5].split(":")[0].strip(): re.split(r"  +", line) for line in table[1:]
    }


@pytest.mark.parametrize(
    "machine, options", [("dgx-1v", ["--bytes=20MB"]), ("pcie-pairs", ["--model=mobilenet_v2"])]
)
def test_json_has_everything_to_run_the_plan(values, machine, options):
    found = values(machine, *options, "--step=50ms")
    assert list(found) == ["machine", "model", "step_seconds", "rows", "plan", "chunks", "ops"]
    assert found["machine"] == Topology.load(machine).name and found["step_seconds"] == 0.05
    assert list(found["plan"]) == ["algorithm", "towers", "chunk_bytes", "schedules"]
    for schedule in found["plan"]["schedules"]:
        check(
            [
                Reduce(tuple(srcs), dst) if kind == "reduce" else Copy(srcs[0], dst)
                for kind, srcs, dst in schedule
            ],
            8,
        )
    ready = [chunk["ready"] for chunk in found["chunks"]]
    assert ready == sorted(ready) and 0.5 > ready[0] > 0 and ready[-1] == pytest.approx(1)
    assert max(chunk["bytes"] for chunk in found["chunks"]) <= found["plan"]["chunk_bytes"]
    if "20MB" in options[0]:
        assert sum(chunk["bytes"] for chunk in found["chunks"]) == 20_000_000
    # each chunk is copied to, and from, all towers but one; each copy is a node at both ends
    assert found["ops"] >= 4 * 7 * len(found["chunks"])
    for row in found["rows"]:
        assert list(row) == [
            "name",
            "exposed_seconds",
            "exposed_low",
            "exposed_high",
            "step_seconds",
        ]
        assert row["exposed_low"] <= row["exposed_seconds"] <= row["exposed_high"]
        assert row["step_seconds"] == pytest.approx(0.05 + row["exposed_seconds"])
    assert (
        found["rows"][2]["exposed_low"]
        < found["rows"][2]["exposed_seconds"]
        < found["rows"][2]["exposed_high"]
    )
    assert [row["name"] for row in found["rows"]][:4] == ["ours", "ours, by rule", *OTHERS]


def test_text_and_json_agree(run, values):
    options = ["dgx-1v", "--model=resnet50", "--step=180ms", "--backward=100ms"]
    shown, found = rows_of(run("plan", *options)[1]), values(*options)
    for row, printed in zip(found["rows"], shown.values()):
        assert printed[0].startswith(row["name"])
        exposed, efficiency = row["exposed_seconds"] * 1e3, 100 * 0.18 / row["step_seconds"]
        assert printed[1:3] == [
            f"{float(f'{row[key] * 1e3:.2g}'):g} ms" for key in ("step_seconds", "exposed_seconds")
        ]
        assert exposed > 1 and printed[4] == f"{efficiency:.2g} %"


def test_the_lines_for_people(run):
    status, out, err = run("plan", "dgx-1v", "--model", "resnet50", "--step", "180ms")
    links, training, _, verdict, notes = out.rstrip("\n").split("\n\n")
    assert (status, err) == (0, "") and len(links.splitlines()) == 4
    assert links.splitlines()[0].endswith("links, in each direction:")
    assert re.search(r"^  NV2 \(2 NVLinks\) +8 pairs +46 GB/s$", links, re.M)
    assert (
        "SYS (between sockets)  12 pairs  9.2 GB/s  copies out of GPU0+GPU1+GPU2+GPU3 share an uplink, 19 GB"
        in links
    )
    assert (
        "a step of 180 ms, 120 ms of it the backward pass" in training
        and "assumed: backward pass)" in training
    )
    assert re.match(
        r"Ours saves [\d.]+ % of a step of \w+\. Where NCCL works, it is about as fast or", verdict
    )
    assert (
        notes.startswith("Exposed: ")
        and "ahead of the GPUs" in notes
        and "how long the backward pass is" not in notes
    )
    assert "how long the backward pass is" in " ".join(run("plan", "dgx-1v")[1].split())


def test_differences_below_two_percent_are_about_the_same(run, values):
    rows = rows_of(run("plan", "2x-rtx-5090", "--step=1s")[1])
    assert {row[-1] for name, row in rows.items() if name != "ours"} == {"about the same"}
    assert "Ours is about the same as" in run("plan", "2x-rtx-5090", "--step=1s")[1]
    assert rows_of(run("plan", "dgx-1v", "--step=60ms")[1])["ReductionToOneDevice"][-1].startswith(
        "+"
    )


def test_an_algorithm_of_two_all_reduces_that_is_wrong_is_not_recommended(run):
    three = (
        "\tGPU0\tGPU1\tGPU2\nGPU0\t X \tNV12\tNV12\nGPU1\tNV12\t X \tNV12\nGPU2\tNV12\tNV12\t X \n"
    )
    out = run("plan", "-", stdin=three)[1]
    assert "HierarchicalCopyAllReduce: wrong sums on 3 GPUs" in out
    assert re.search(r"ReductionToOneDevice[.:]", out.split("\n\n")[3])


def test_tensorpacks_modes_are_shown_with_list(run):
    short, long = (rows_of(run("plan", "dgx-1v", *options)[1]) for options in ([], ["--list"]))
    assert not any("tensorpack" in name for name in short)
    assert {"tensorpack, mode gpu", "tensorpack, mode hierarchical", "ours too"} <= set(long)


@pytest.mark.parametrize(
    "machine, is_known", [("dgx-1v", True), ("4x-rtx-5090", True), ("pcie-pairs", False)]
)
def test_nccl_is_known_by_the_machines_gpus_and_links(run, tmp_path, machine, is_known):
    copied = tmp_path / "other.yaml"
    copied.write_text(Topology.load(machine).to_yaml())
    for name in (machine, copied):
        assert ("NCCL as published" in run("plan", name)[1]) == is_known


def test_the_times_of_a_user_are_not_varied(values):
    for options, factor in (([], 1), (["--step=90ms"], 1), (["--step=180ms"], 2)):
        assert values("dgx-1v", *options)["step_seconds"] == pytest.approx(0.09 * factor, rel=0.01)
    assert values("dgx-1v", "--backward=100ms")["step_seconds"] == pytest.approx(0.15)
    # without a range of the backward pass, a mean over other cases
    guessed, known = (
        values("dgx-1v", *options)["rows"][2] for options in ([], ["--backward=60ms"])
    )
    assert guessed["exposed_low"] != known["exposed_low"]


def test_sparse_gradients_are_left_out(run, fails, tmp_path):
    model = tmp_path / "model.tsv"
    model.write_text(
        "name\tshape\tdtype\tsparse\nrows\t9,9\tfloat32\tyes\nw\t1000,25000\tfloat32\tno\n"
    )
    assert "100 MB; 1 sparse gradient left out" in run("plan", "dgx-1v", "--model", model)[1]
    model.write_text("name\tshape\tdtype\tsparse\nrows\t9,9\tfloat32\tyes\n")
    assert "sparse or empty" in fails("plan", "dgx-1v", "--model", model)


# ---- machines ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [TABLE.encode(), TABLE.encode("utf-16"), b"$ nvidia-smi topo -m\r\n" + TABLE.encode()]
)
def test_a_machine_from_standard_input_or_a_file(values, tmp_path, data):
    path = tmp_path / "topo.txt"
    path.write_bytes(data)
    piped, read = values("-", stdin=data), values(path)
    assert piped["plan"]["towers"] == 3 and {**piped, "machine": "topo"} == read


def test_warnings_are_printed_and_are_not_in_json(run):
    words = "warning: peer access assumed; GeForce cards have none"
    assert words in run("plan", "-", stdin=TABLE)[1]
    status, out, err = run("plan", "-", "--json", stdin=TABLE)
    assert status == 0 and words in err and json.loads(out)["rows"]
    named = BOX + TABLE.replace("NV2", "NODE").replace("PIX", "NODE")
    assert (
        "no peer access; all copies share the host's memory, 26 GB/s"
        in run("plan", "-", stdin=named)[1]
    )


def test_every_preset_has_at_most_five_lines_of_links(run):
    for machine in presets.names("machines"):
        status, out, err = run("plan", machine, "--bytes=1MB")
        assert status == 0 and 1 <= len(out.split("\n\n")[0].splitlines()[1:]) <= 5, machine
        assert err == ("predicting 16 GPUs …\n" if machine == "dgx-2" else ""), (
            machine
        )  # it takes the longest


def test_a_large_group_of_gpus_is_named_by_its_first_and_last(run):
    kinds = [
        ["X" if a == b else "PIX" if a // 5 == b // 5 else "SYS" for b in range(10)]
        for a in range(10)
    ]
    machine = Topology("two boxes", tuple(f"GPU{k}" for k in range(10)), tuple(map(tuple, kinds)))
    lines = run("plan", "-", "--bytes=1MB", stdin=machine.table())[1].splitlines()
    assert lines[2].endswith(
        "25 pairs  9.2 GB/s  copies out of GPU0+…+GPU4 share an uplink, 12 GB/s"
    )


def test_one_gpu_has_nothing_to_reduce(fails):
    assert "has one GPU, which has nothing to reduce" in fails(
        "plan", "-", stdin="\tGPU0\tCPU Affinity\nGPU0\t X \t0-7\n"
    )


# ---- pictures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "machine, words",
    [
        (
            "dgx-1v",
            [
                "GPU7",
                "uplink, 19 GB/s",
                "bus between sockets",
                "NV2 (2 NVLinks): 8 pairs, 46 GB/s",
                "125 ms",
            ],
        ),
        (
            "4x-rtx-4090",
            [
                "no peer access: host's memory, 26 GB/s in all",
                "hier_allreduce",
                "HierarchicalCopyAllReduce",
            ],
        ),
        (
            "dgx-2",
            ["NVSwitch, 140 GB/s for each GPU", "15", "one of", "predicted step of resnet50"],
        ),
        ("pcie-switch", ["PCIe", "uplink, 12 GB/s", "time goes down; blue: gradients are added"]),
    ],
)
def test_a_picture_shows_the_machine_a_schedule_and_steps(
    run, monkeypatch, tmp_path, machine, words
):
    pytest.importorskip("matplotlib")
    monkeypatch.setitem(sys.modules["matplotlib"].rcParams, "svg.fonttype", "none")
    path = tmp_path / "new" / "plan.svg"
    status, out, _ = run("plan", machine, "--picture", path)
    drawn = path.read_text(encoding="utf-8").replace("&#x27;", "'")
    assert status == 0 and "ours" in out
    assert [word for word in words if word not in drawn] == []


def test_a_picture_needs_matplotlib_and_a_file_that_can_be_written(fails, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    assert "'/proc/x.png' cannot be written" in fails("plan", "dgx-1v", "--picture", "/proc/x.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    error = fails("plan", "dgx-1v", "--picture", tmp_path / "x.png")
    assert '--picture: a picture needs matplotlib: python -m pip install ".[picture]"' in error
