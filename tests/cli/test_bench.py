"""``hier-allreduce bench``: every peer runs, pages are written, invalid arguments are refused."""

import json
import os
import re
import sys

import pytest
from helpers import forks
from helpers.demo import forked_command
from helpers.project import TOP, extras

from hier_allreduce import bench
from hier_allreduce.bench import measuring
from hier_allreduce.bench.contenders import PEERS
from hier_allreduce.cli import entry as cli
from hier_allreduce.errors import BenchError


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
    options = ["--shapes", str(table), "--rounds", "2", "--average", "--strategy", "tensorpack", "--json", str(out)]
    done = forked_command(tmp_path, "bench", *options, code=once)
    assert done.status == 0, done.err
    assert "cannot run" not in done.out and "WRONG" not in done.out
    written = json.loads(out.read_text(encoding="utf-8"))
    by_name = {contender["name"]: contender for contender in written["contenders"]}
    assert list(by_name) == ["ours", *PEERS, "ours:tensorpack", "floor"]
    for measured in by_name.values():
        assert measured["status"] == "ok" and len(measured["step_seconds"]) == 2
        assert measured["max_error"] < 1e-5
    # the published schedule: at 8 devices 12 copies inside the quads and 2 between them, for each of five variables
    for name in ("tensorpack", "distribute-0", "ours:tensorpack"):
        assert sum(count for count, _ in by_name[name]["copies"].values()) == 5 * 14
    assert sum(count for count, _ in by_name["tensorpack-packed"]["copies"].values()) == 8 * 14
    assert sum(size for _, size in by_name["tensorpack-packed"]["copies"].values()) == 14 * written["tower_bytes"]


@pytest.fixture
def forking(monkeypatch):
    """Fork the processes that the bench would start."""
    context = forks.context()  # which gets itself from the function that is replaced
    monkeypatch.setattr("multiprocessing.get_context", lambda method: context)


def test_a_page_of_all_models(table, tmp_path, monkeypatch, forking):
    from hier_allreduce.cli import bench as command

    monkeypatch.setattr(command, "MODELS", (str(table),))
    page = tmp_path / "page.md"
    arguments = ["--rounds", "1", "--devices", "3", "--contenders", "ours,distribute-0,floor", "--table", str(page)]
    assert cli.main(["bench", *arguments]) == 0
    text = page.read_text(encoding="utf-8")
    assert "## table, sum over 3 devices" in text and "## table, mean over 3 devices" in text
    assert "- distribute-0 wrong:" in text
    columns = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert columns == {13, 4}  # the tables, and all ratios at a glance
    assert "| times ours | table, sum | table, mean |" in text.split("## table, sum")[0]


def die(args, name, average):
    os._exit(9)


def test_a_case_whose_process_is_killed_is_named(monkeypatch, forking):
    from hier_allreduce.cli import bench as command

    monkeypatch.setattr(command, "_measured", die)
    with pytest.raises(BenchError, match="resnet50: its process was killed"):
        command._measured_apart(None, "resnet50", False)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "resnet5"], "did you mean 'resnet50'"),
        (["--shapes", "/nowhere.tsv"], "'/nowhere.tsv' is neither a file nor one of the models"),
        (["--contenders", "ours,floor,tensorpak"], "did you mean 'tensorpack'"),
        (["--strategy", "no-such"], "'no-such' is neither a file nor one of the strategies"),
        (["--topology", "dgx-1w"], "'dgx-1w'"),
        (["--table", "x.md", "--average", "--model", "vgg16"], "--table makes no use of --model, --average"),
        (["sizes", "-b", "1MB", "-e", "1kB"], "--least 1000000 bytes is more than --most 1000"),
        (["sizes", "--contenders", "ours,ncll"], "did you mean 'nccl'"),
        (["--split-gpu", "8"], "finds no GPU here"),
    ],
)
def test_bad_arguments_are_one_line_before_anything_is_measured(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(bench, "measure", None)
    monkeypatch.setattr(measuring, "interleaved", None)
    assert cli.main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and not out


def test_help_says_which_mode_is_the_default(capsys):
    for arguments in (["--help"], ["peers", "--help"]):
        with pytest.raises(SystemExit):
            cli.main(["bench", *arguments])
    whole, _, peers = capsys.readouterr().out.partition("usage: hier-allreduce bench peers [-h]")
    assert whole.startswith("usage: hier-allreduce bench [-h] [MODE] ...\n") and peers
    assert "The default MODE is peers: `bench --model resnet50` is `bench peers --model resnet50`" in " ".join(
        whole.split()
    )


@pytest.mark.parametrize("module", ["tqdm", "tensorflow"])
def test_what_the_bench_needs_is_said_in_words(module, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, module, None)
    assert cli.main(["bench"]) == 2
    words = f'hier-allreduce bench: the bench needs {module}: python -m pip install "hier_allreduce[tf,bench]"\n'
    assert capsys.readouterr().err == words


def test_the_extras_that_are_named_exist_and_bring_what_the_bench_needs():
    assert extras()["bench"] == ["matplotlib", *extras()["tensorpack"]]  # the default contenders
    texts = [path.read_text(encoding="utf-8") for path in (TOP / "Makefile", *TOP.glob("hier_allreduce/cli/*.py"))]
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
        ["--rounds", "-1"],
        ["--rows", "many"],
        ["--memory", "-1"],
        ["--memory", "inf"],
        ["--memory", "x"],
        ["--json", "/nope/x"],
        ["--table", "nope/x.md"],
        ["--shapes", "mine.tsv", "--model", "vgg16"],
    ],
)
def test_counts_and_sizes_are_checked(arguments, capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", *arguments])
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, mode",
    [([], ["peers"]), (["--model", "vgg16"], ["peers", "--model", "vgg16"]), (["-h"], ["-h"]), (["sweep"], ["sweep"])],
)
def test_the_mode_is_peers_unless_it_is_given(arguments, mode):
    from hier_allreduce.cli.bench import with_mode

    assert with_mode(arguments) == mode


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["sweep", "--contenders", "ours"], "unrecognized arguments: --contenders ours"),
        (["sizes", "-f", "1"], "expected a whole number of 2 or more"),
    ],
)
def test_a_mode_has_only_its_own_options(arguments, words, capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", *arguments])
    assert words in capsys.readouterr().err


def test_sizes_are_a_row_for_each_contender(tmp_path):
    out = tmp_path / "out.json"
    program = "import sys; from hier_allreduce.cli import main; sys.exit(main(sys.argv[1:]))"
    sizes = ["-b", "1KiB", "-e", "16KiB", "--devices", "3", "--rounds", "2", "--contenders", "ours,distribute-0,nccl"]
    done = forks.run_forked(program, "bench", "sizes", *sizes, "--json", str(out), folder=tmp_path)
    assert done.status == 0, done.err
    lines = [line.split() for line in done.out.splitlines() if "KiB" in line]
    names = ["ours", "distribute-0", "nccl"]
    assert [(line[0], line[2]) for line in lines] == [(size, name) for size in ("1", "4", "16") for name in names]
    assert [line[-1] for line in lines[1::3]] == ["WRONG"] * 3  # TensorFlow's own hierarchical copy, of 3 devices
    assert all("NCCL reduces between GPUs only" in " ".join(line) for line in lines[2::3])
    assert [report["bytes"] for report in json.loads(out.read_text(encoding="utf-8"))] == [1 << 10, 4 << 10, 16 << 10]
