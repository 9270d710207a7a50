"""``hier-allreduce bench``: every peer runs, and invalid arguments are refused."""

import contextlib
import json
import os
import re
import sys
from types import SimpleNamespace

import pytest
from helpers import forks
from helpers.demo import forked_command
from helpers.project import TOP, extras

from hier_allreduce import bench
from hier_allreduce.bench import measuring
from hier_allreduce.bench.contenders import PEERS
from hier_allreduce.cli import common
from hier_allreduce.cli import entry as cli
from hier_allreduce.errors import HierAllreduceError


@pytest.fixture
def table(tmp_path):
    """A table of five small variables, with enough numbers for tensorpack's packer."""
    lines = ["name\tshape\tdtype", *(f"v{n}\t{n + 1},{900 if n % 3 else 1}\tfloat32" for n in range(5))]
    path = tmp_path / "table.tsv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_every_peer_runs_on_eight_devices(table, tmp_path):
    """In a process of its own, since importing tensorpack changes global state."""
    out = tmp_path / "out.json"
    once = "from hier_allreduce.bench import measuring; measuring._BUILDS = 1"  # instead of the median of three
    names = ["ours", *PEERS, "ours:tensorpack", "floor"]
    options = ["--rounds", "2", "--average", "--contenders", ",".join(names), "--json", str(out)]
    done = forked_command(tmp_path, "bench", "--model", str(table), *options, code=once)
    assert done.status == 0, done.err
    assert "cannot run" not in done.out and "WRONG" not in done.out
    assert re.search(rf"^{len(PEERS) + 1} more contenders: about .* s\n2 rounds: about .*s$", done.err, re.M), done.err
    written = json.loads(out.read_text(encoding="utf-8"))
    by_name = {contender["name"]: contender for contender in written["contenders"]}
    assert list(by_name) == names
    for measured in by_name.values():
        assert measured["status"] == "ok" and len(measured["step_seconds"]) == 2
        assert measured["max_error"] < 1e-5
    # the published schedule: at 8 devices 12 copies inside the quads and 2 between them, for each of five variables
    for name in ("tensorpack", "distribute-0", "ours:tensorpack"):
        assert sum(count for count, _ in by_name[name]["copies"].values()) == 5 * 14
    assert sum(count for count, _ in by_name["tensorpack-packed"]["copies"].values()) == 8 * 14
    assert sum(size for _, size in by_name["tensorpack-packed"]["copies"].values()) == 14 * written["tower_bytes"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "resnet5"], "did you mean 'resnet50'"),
        (["--model", "/nowhere.tsv"], "'/nowhere.tsv' is neither a file nor one of the models"),
        (["--contenders", "ours,floor,tensorpak"], "did you mean 'tensorpack'"),
        (["--contenders", "ours:no-such"], "'no-such' is neither a file nor one of the strategies"),
        (["--topology", "dgx-1w"], "'dgx-1w'"),
        (["-f", "2"], "`bench peers` makes no use of --factor, which `bench sizes` has"),
        (["sizes", "--model", "vgg16", "--topology", "x"], "`bench sizes` makes no use of --model, --topology"),
        (["sizes", "-b", "1MB", "-e", "1kB"], "--least 1000000 bytes is more than --most 1000"),
        (["sizes", "--contenders", "ours,ncll"], "did you mean 'nccl'"),
        (["--split-gpu", "8"], "finds no GPU here"),
    ],
)
def test_bad_arguments_are_one_line_before_anything_is_measured(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(bench, "measure", None)
    monkeypatch.setattr(measuring, "in_turn", None)
    assert cli.main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and not out


def test_the_mode_is_peers_unless_it_is_given():
    for arguments, mode in (([], "peers"), (["--model", "vgg16"], "peers"), (["sizes", "-b", "8"], "sizes")):
        assert cli.parser("bench").parse_args(["bench", *arguments]).mode == mode


def test_what_the_bench_needs_is_said_in_words(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    assert cli.main(["bench"]) == 2
    words = 'hier-allreduce bench: the bench needs tensorflow: python -m pip install ".[tf,bench]" in the checkout'
    assert capsys.readouterr().err.startswith(words)


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_a_wrong_model_is_told_before_tensorflow_is_imported(monkeypatch, capsys, command):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    assert cli.main([command, "--model", "resnet5"]) == 2
    assert "did you mean 'resnet50'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "level, error, shown",
    [
        (None, None, False),
        ("3", None, False),
        ("0", None, True),  # the user wants to see them
        (None, ValueError("broken"), True),
        (None, HierAllreduceError("one line"), False),
    ],
)
def test_start_up_lines_are_shown_only_with_an_error(monkeypatch, capfd, level, error, shown):
    def starts():
        os.write(2, b"oneDNN custom operations are on\n")
        if error:
            raise error

    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    if level:
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", level)
    monkeypatch.setattr(common.importlib, "import_module", lambda name: SimpleNamespace(gpu_count=starts))
    with pytest.raises(type(error)) if error else contextlib.nullcontext():
        common.import_tensorflow("the bench")
    assert ("oneDNN" in capfd.readouterr().err) is shown
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == level or "2"


def test_named_extras_exist_and_bring_what_bench_needs():
    assert extras()["bench"] == ["matplotlib", *extras()["tensorpack"]]  # the default contenders
    texts = [path.read_text(encoding="utf-8") for path in (TOP / "Makefile", *TOP.glob("hier_allreduce/cli/**/*.py"))]
    named = {
        extra
        for text in texts
        for names in re.findall(r"(?:'.|allreduce)\[([\w,]+)\]|\"(tf,\w+)\"", text)
        for extra in "".join(names).split(",")
    }
    assert {"tf", "bench", "demo"} < named <= set(extras())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--devices", "0"],
        ["--devices", "257"],
        ["--split-gpu", "257"],
        ["--rounds", "-1"],
        ["--json", "/nope/x"],
        ["-f", "1"],
    ],
)
def test_counts_and_sizes_are_checked(arguments, capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", *arguments])
    assert arguments[0] in capsys.readouterr().err


def test_sizes_are_a_row_for_each_contender(tmp_path):
    out = tmp_path / "out.json"
    program = "import sys; from hier_allreduce.cli import main; sys.exit(main(sys.argv[1:]))"
    sizes = ["-b", "1KiB", "-e", "16KiB", "--devices", "3", "--rounds", "2", "--contenders", "ours,distribute-0,nccl"]
    done = forks.run_forked(program, "bench", "sizes", *sizes, "--json", str(out), folder=tmp_path)
    assert done.status == 0, done.err
    assert re.search(r"^2 smaller sizes: at most about .*s$", done.err, re.M), done.err
    lines = [line.split() for line in done.out.splitlines() if "KiB" in line]
    names = ["ours", "distribute-0", "nccl"]
    assert [(line[0], line[2]) for line in lines] == [(size, name) for size in ("1", "4", "16") for name in names]
    assert [line[-1] for line in lines[1::3]] == ["WRONG"] * 3  # TensorFlow's own hierarchical copy, of 3 devices
    assert all("NCCL needs GPUs" in " ".join(line) for line in lines[2::3])
    assert [report["bytes"] for report in json.loads(out.read_text(encoding="utf-8"))] == [1 << 10, 4 << 10, 16 << 10]
