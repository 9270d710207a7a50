"""The bench: correct numbers for contenders whose numbers are known, every peer listed, invalid input refused."""

import configparser
import json
import os
import re
import sys
from pathlib import Path

import pytest
import tensorflow as tf
from helpers import forks
from helpers.graphs import cpus

from hier_allreduce import presets
from hier_allreduce.bench import floor as floor_module
from hier_allreduce.bench import measuring, results
from hier_allreduce.bench import models as shapes
from hier_allreduce.bench import page as bench_page
from hier_allreduce.bench import report as bench_report
from hier_allreduce.bench.case import Case, devices_here
from hier_allreduce.bench.contenders import (
    PEERS,
    Contender,
    find_contender,
    is_ours,
    ours,
    planned_for,
    sweep_contenders,
)
from hier_allreduce.bench.models import GradientShape
from hier_allreduce.cli import entry as cli
from hier_allreduce.errors import BenchError, StrategyError
from hier_allreduce.planning.strategy import Strategy

MIB = 1 << 20
SMALL = (
    GradientShape("kernel", (64, 32), "float32"),
    GradientShape("scale", (), "float32"),
    GradientShape("embedding", (50, 4), "float32", sparse=True),
    GradientShape("counts", (7,), "int32"),
)


def case(columns=SMALL, devices=4, **how):
    return Case(columns, tuple(cpus(devices)), rows=8, **how)


def one(build, columns=SMALL[:2], devices=3, **how):
    """Return what the bench measures of one contender in one round."""
    report = measuring.measure(case(columns, devices, **how), [Contender("it", build)], rounds=1, floor=False)
    return report.contenders[0]


def flat_sum(grads, devices, average):
    """Added up on the first device, copied to all."""
    total = []
    with tf.device(devices[0]):
        total = [tf.add_n(column) for column in zip(*grads)]
    rows = []
    for device in devices:
        with tf.device(device):
            rows.append([tf.identity(value) for value in total])
    return rows


# ---- tables of shapes ------------------------------------------------------------------------------

PARAMETERS = {  # as published for these models
    "alexnet": 61_100_840,
    "bert_base": 109_482_240,
    "gpt2_small": 124_439_808,
    "mobilenet_v2": 3_504_872,
    "resnet152": 60_192_808,
    "resnet50": 25_557_032,
    "vgg16": 138_357_544,
}


@pytest.mark.parametrize("model", presets.names("models"))
def test_every_shipped_table_reads(model):
    table = shapes.load_model(model)
    assert len({shape.name for shape in table}) == len(table)
    if model in PARAMETERS:
        assert sum(shape.elements for shape in table) == PARAMETERS[model]


def test_the_embeddings_of_dlrm_are_sparse():
    table = shapes.load_model("dlrm_criteo_kaggle")
    assert [shape.name for shape in table if shape.sparse] == [f"emb_{n}" for n in range(26)]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])  # the second is what Windows writes
@pytest.mark.parametrize("first", ["", "# mine\n"])
def test_a_table_of_ones_own(tmp_path, first, encoding):
    path = tmp_path / "mine.tsv"
    path.write_text(f"{first}name\tshape\tdtype\tsparse\na\t3, 4\tfloat16\t\nb\t\tint64\tno\nc\tscalar\tfloat64\t\n"
                    "\nd\t9,2\tfloat32\tyes\n", encoding=encoding)  # fmt: skip
    table = shapes.load_model(str(path))
    assert [(s.shape, s.dtype, s.sparse, s.dense_bytes) for s in table] == [
        ((3, 4), "float16", False, 24),
        ((), "int64", False, 8),
        ((), "float64", False, 8),
        ((9, 2), "float32", True, 72),
    ]


HEADER = "name\tshape\tdtype\n"


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "empty; expected a header"),
        (HEADER, "a header, but no variables"),
        ("shape\tname\tdtype\na\t1\tfloat32\n", "line 1: the header is"),
        ("name,shape,dtype\n", "line 1: the header is .* separated by tabs"),
        (HEADER + "a\t1\n", "line 2: no dtype"),
        (HEADER + "\t1\tfloat32\n", "line 2: no name"),
        (HEADER + "a\t1\tfloat32\nb\t2x3\tfloat32\n", "line 3: shape '2x3'; expected whole numbers"),
        (HEADER + "a\t-1\tfloat32\n", "line 2: shape '-1'"),
        (HEADER + "a\t1\tflaot32\n", "line 2: dtype 'flaot32'; did you mean 'float32'"),
        ("name\tshape\tdtype\tsparse\na\t1\tfloat32\tperhaps\n", "line 2: sparse is 'perhaps'"),
        ("name\tshape\tdtype\tsparse\na\t\tfloat32\tyes\n", "line 2: a scalar has no rows"),
    ],
)
def test_a_bad_table_is_refused_with_its_line(tmp_path, text, message):
    path = tmp_path / "bad.tsv"
    path.write_text(text)
    with pytest.raises(BenchError, match=message):
        shapes.load_model(str(path))


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "bad.tsv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BenchError, match="not readable as text"):
        shapes.load_model(str(path))


# ---- what is measured about one contender ----------------------------------------------------------


def test_nodes_copies_and_bytes_are_those_of_the_executed_graph():
    measured = one(flat_sum, columns=(SMALL[0],), devices=3)
    assert (measured.status, measured.error) == ("ok", "")
    assert measured.nodes_built == 1 + 3
    assert measured.copies == {
        ("cpu:1", "cpu:0"): (1, 8192),
        ("cpu:2", "cpu:0"): (1, 8192),
        ("cpu:0", "cpu:1"): (1, 8192),
        ("cpu:0", "cpu:2"): (1, 8192),
    }
    assert (measured.copied_tensors, measured.copied_bytes) == (4, 4 * 8192)
    assert measured.nodes_executed >= 1 + 2 * 4  # the sum and a pair for each copy


def test_peak_memory_counts_what_is_there_at_one_time():
    big = GradientShape("big", (MIB,), "float32")
    assert 4 * MIB <= one(flat_sum, columns=(big,), devices=3).peak_bytes < 5 * MIB

    def one_after_the_other(grads, devices, average):
        value = grads[0][0]
        for _ in range(5):
            value = tf.roll(value, 1, 0)  # from one buffer into another
        return [[value]]

    assert 8 * MIB <= one(one_after_the_other, columns=(big,), devices=1).peak_bytes < 9 * MIB


def test_the_sum_is_not_optimized_away():
    """Consumers that only waited for the results would let Grappler drop every addition."""
    big = GradientShape("big", (MIB,), "float32")
    nothing = one(lambda grads, devices, average: grads, columns=(big,), devices=1)
    assert nothing.peak_bytes == 0 and nothing.nodes_executed == 0
    assert one(flat_sum, columns=(big,), devices=3).peak_bytes


@pytest.mark.parametrize("average", [False, True])
def test_ours_is_right_for_every_kind(average):
    columns = SMALL[:3] if average else SMALL
    report = measuring.measure(case(columns, average=average), [ours()], rounds=2, floor=True)
    assert [(m.name, m.status) for m in report.contenders] == [("ours", "ok"), ("floor", "ok")]
    assert report.contenders[0].max_error < 1e-5
    assert all(len(m.step_seconds) == 2 for m in [report.baseline, *report.contenders])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int64"])
def test_other_dtypes_are_measured_too(dtype):
    report = measuring.measure(case((GradientShape("v", (9, 5), dtype),)), [ours()], rounds=1, floor=False)
    assert (report.contenders[0].status, report.contenders[0].error) == ("ok", "")


def drop_last(grads, devices, average):
    return flat_sum(grads[:-1], devices, average)


def swap_variables(grads, devices, average):
    return [row[::-1] for row in flat_sum(grads, devices, average)]


def one_tower_forgotten(grads, devices, average):
    return [*flat_sum(grads, devices, average)[:-1], grads[-1]]


@pytest.mark.parametrize("build", [drop_last, swap_variables, one_tower_forgotten])
def test_a_wrong_result_is_called_wrong(build):
    measured = one(build, columns=(SMALL[0], GradientShape("other", (64, 32), "float32")))
    assert measured.status == "wrong" and "% off the sum" in measured.error
    assert measured.step_seconds  # and it is timed all the same


def test_a_shape_that_changed_is_wrong():
    measured = one(lambda *how: [[tf.reshape(v, [-1])[1:] for v in row] for row in flat_sum(*how)], columns=SMALL[:1])
    assert measured.status == "wrong"


def raises(grads, devices, average):
    raise AssertionError("not with me")


def one_row(grads, devices, average):
    return flat_sum(grads, devices, average)[:1]


@pytest.mark.parametrize(
    "build, error",
    [
        (raises, "AssertionError: not with me"),
        (one_row, "it returned rows of [2] for rows of [2, 2, 2] gradients"),
        (lambda grads, devices, average: [[tf.debugging.check_numerics(v / 0.0, "bad") for v in row] for row in grads],
         "InvalidArgumentError"),
    ],
)  # fmt: skip
def test_a_contender_that_cannot_run_is_listed_with_its_error(build, error):
    measured = one(build)
    assert measured.status == "cannot run" and error in measured.error and not measured.step_seconds


def densify(grads, devices, average):
    return flat_sum([[tf.convert_to_tensor(v) for v in row] for row in grads], devices, average)


def test_dense_copies_of_sparse_gradients_are_run_only_where_they_fit():
    columns = SMALL[2:3]
    assert one(densify, columns).status == "ok"
    refused = one(densify, columns, memory=3 * 50 * 4 * 4 - 1)
    assert refused.status == "cannot run" and "makes 1 sparse gradients dense" in refused.error


# ---- contenders ------------------------------------------------------------------------------------


def test_tf_distribute_is_wrong_for_an_odd_number_of_devices_and_right_for_an_even_one():
    for devices, status in ((3, "wrong"), (4, "ok")):
        peers = [find_contender(name) for name in ("distribute-0", "distribute-1", "distribute-8")]
        report = measuring.measure(case(SMALL[:2], devices), peers, rounds=1, floor=False)
        assert {m.status for m in report.contenders} == {status}


def test_unknown_contenders_are_refused_with_the_nearest():
    with pytest.raises(BenchError, match="did you mean 'tensorpack-packed'"):
        find_contender("tensorpack-paked")
    with pytest.raises(StrategyError, match="'fastest' is neither a file nor one of the strategies"):
        find_contender("ours:fastest")
    assert find_contender("ours:tensorpack").name == "ours:tensorpack"


def test_the_sweep_begins_with_the_default_and_names_each_choice():
    names = [contender.name for contender in sweep_contenders()]
    assert (
        names[0] == "ours"
        and {"ours:pack_below=0", "ours:pack_below=4K", "ours:mains=rotate"} < set(names)
        and len(set(names)) == len(names)
    )
    assert ours(Strategy(pack_below=0), "plain").name == "plain"


def test_ours_planned_for_a_machine():
    contender = planned_for("p3.8xlarge")
    assert is_ours(contender.name) and contender.name == "ours on p3.8xlarge"
    assert one(contender.build, devices=4).status == "ok"
    refused = one(contender.build, devices=5)  # it has 4 GPUs
    assert refused.status == "cannot run" and "p3.8xlarge" in refused.error


# ---- the floor -------------------------------------------------------------------------------------


def test_the_floor_takes_all_bytes_in_pieces_and_extrapolates_beyond_its_limit(monkeypatch):
    columns = (GradientShape("dense", (3 * MIB,), "float32"), *SMALL[2:3])
    whole = floor_module.Floor(case(columns, 2))
    whole.step()
    whole.close()
    assert whole.scale == 1
    monkeypatch.setattr(floor_module, "_AT_MOST", 6 * MIB)
    part = floor_module.Floor(case(columns, 2))
    part.step()
    part.close()
    assert part.scale == pytest.approx(4, rel=0.01)
    pieces = floor_module._pieces(2 * MIB + 8)
    assert [shape.elements for shape in pieces] == [MIB // 4, MIB // 4, 2]


# ---- ratios, text, picture -------------------------------------------------------------------------


def made_up(**step_seconds):
    measured = [results.Measured(name, step_seconds=seconds) for name, seconds in step_seconds.items()]
    return results.Report(case(), results.Measured("baseline", step_seconds=[1.0, 1.0, 9.0]), measured)


def test_ratios_are_paired_and_over_the_baseline():
    report = made_up(ours=[2.0, 3.0, 5.0], peer=[3.0, 7.0, 5.0], floor=[0.5, 1.0, 2.0])
    ours_measured, peer, floor_measured = report.contenders
    assert report.net_seconds(peer) == [2.0, 6.0, 4.0]
    assert report.ratio(ours_measured) == 1
    assert report.ratio(peer) == 2  # of 2, 3, 1
    assert report.ratio(floor_measured) == 0.5  # of 0.5, 0.5, 0.5: no baseline in it
    assert results.quartiles([1, 2, 3, 4, 5]) == (2, 3, 4)


def test_without_ours_there_is_no_ratio_and_no_picture(tmp_path):
    assert made_up(peer=[2.0]).ratio(made_up(peer=[2.0]).contenders[0]) is None
    for report in (made_up(peer=[2.0, 2.0, 2.0]), made_up(ours=[0.5, 0.5, 0.5], peer=[2.0, 2.0, 2.0])):
        assert report.ratio(report.contenders[-1]) is None
        assert "peer" in bench_report.report_text("x", report)
        with pytest.raises(BenchError, match="nothing to draw"):
            bench_report.draw_report("x", report, str(tmp_path / "x.png"))


def test_the_table_has_at_most_100_columns():
    """With the longest names; not with the times of a machine that was busy for long just then."""
    copies = {("cpu:0", "cpu:1"): (140, 1 << 30)}
    numbers = {"nodes_built": 1234, "nodes_executed": 1234, "build_seconds": 9.5, "first_run_seconds": 9.5}
    report = made_up(**{name: [9.0, 9.5, 9.9] for name in ("ours", *PEERS, "ours:tensorpack")})
    for measured in report.contenders:
        vars(measured).update(numbers, copies=copies)
    lines = bench_report.report_text("table", report).splitlines()
    assert len(lines) > 2 + len(PEERS) and max(map(len, lines)) <= 100


def test_all_ratios_at_a_glance():
    first = made_up(ours=[2.0, 3.0, 5.0], peer=[3.0, 7.0, 5.0])
    second = made_up(ours=[2.0, 3.0, 5.0], other=[2.0, 3.0, 5.0])
    second.case = case(average=True)
    assert bench_report.report_summary([("a/x.tsv", first), ("y", second)]).splitlines() == [
        "| times ours | x, sum | y, mean |",
        "| :-- | --: | --: |",
        "| ours | 1.00 | 1.00 |",
        "| peer | 2.00 | – |",
        "| other | – | 1.00 |",
    ]


def test_devices_are_logical_cpus_where_there_are_no_gpus():
    assert devices_here() == tuple(cpus(8))
    assert devices_here(3) == tuple(cpus(3))


def test_cores_are_counted_where_the_system_does_not_say_which_are_ours(monkeypatch):
    monkeypatch.delattr("os.sched_getaffinity", raising=False)  # as on Windows and macOS
    report = made_up(ours=[2.0, 3.0, 5.0])
    assert results.cores() == report.as_dict()["cores"] == os.cpu_count()
    assert f"{os.cpu_count()} cores, 3 rounds" in bench_report.case_lines(report)[0]


# ---- the command -----------------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path):
    """A table of ten small variables, with enough numbers for tensorpack's packer."""
    lines = ["name\tshape\tdtype", *(f"v{n}\t{n + 1},{400 if n % 3 else 1}\tfloat32" for n in range(10))]
    path = tmp_path / "table.tsv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_every_peer_runs_on_eight_devices(table, tmp_path):
    """In a process of its own, since importing tensorpack changes global state."""
    out = tmp_path / "out.json"
    program = "import sys; from hier_allreduce.cli import main; sys.exit(main(sys.argv[1:]))"
    options = ["--shapes", str(table), "--rounds", "2", "--average", "--strategy", "tensorpack", "--json", str(out)]
    done = forks.run_forked(program, "bench", *options, folder=tmp_path)
    assert done.status == 0, done.err
    assert "cannot run" not in done.out and "WRONG" not in done.out
    written = json.loads(out.read_text(encoding="utf-8"))
    by_name = {contender["name"]: contender for contender in written["contenders"]}
    assert list(by_name) == ["ours", *PEERS, "ours:tensorpack", "floor"]
    for measured in by_name.values():
        assert measured["status"] == "ok" and len(measured["step_seconds"]) == 2
        assert measured["max_error"] < 1e-5
    # the published schedule: at 8 devices 12 copies inside the quads and 2 between them, for each of ten variables
    for name in ("tensorpack", "distribute-0", "ours:tensorpack"):
        assert sum(count for count, _ in by_name[name]["copies"].values()) == 10 * 14
    assert sum(count for count, _ in by_name["tensorpack-packed"]["copies"].values()) == 8 * 14
    assert sum(size for _, size in by_name["tensorpack-packed"]["copies"].values()) == 14 * written["tower_bytes"]


def test_a_picture_of_the_ratios(tmp_path, monkeypatch):
    from hier_allreduce.cli import bench as command

    report = made_up(ours=[2.0, 3.0, 5.0], peer=[3.0, 7.0, 5.0], floor=[0.5, 1.0, 2.0])
    monkeypatch.setattr(command, "_measured", lambda args, name, average: report)
    picture = tmp_path / "out.png"
    assert cli.main(["bench", "--picture", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5000


def test_a_page_of_all_models(table, tmp_path, monkeypatch, capsys):
    from hier_allreduce.cli import bench as command

    monkeypatch.setattr(command, "MODELS", (str(table),))
    context = forks.context()  # which gets itself from the function that is replaced
    monkeypatch.setattr("multiprocessing.get_context", lambda method: context)
    page = tmp_path / "page.md"
    arguments = ["--rounds", "1", "--devices", "3", "--contenders", "ours,distribute-0,floor", "--table", str(page)]
    assert cli.main(["bench", *arguments]) == 0
    text = page.read_text(encoding="utf-8")
    assert "## table, sum over 3 devices" in text and "## table, mean over 3 devices" in text
    assert "- distribute-0 wrong:" in text
    columns = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert columns == {13, 4}  # the tables, and all ratios at a glance
    assert "| times ours | table, sum | table, mean |" in text.split("## table, sum")[0]


@pytest.mark.parametrize("name", ["measurements", "defaults"])
def test_the_pages_in_docs_have_the_notes_that_the_bench_writes(name):
    text = (Path(__file__).parents[2] / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert f"{bench_page.NOTES}\n| times ours |" in text
    assert (bench_page._SWEEP.strip() in text) == (name == "defaults")


def die(args, name, average):
    os._exit(9)


def test_a_case_whose_process_is_killed_is_named(monkeypatch):
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
        (
            ["--updates", "adam", "--json", "x.json", "--contenders", "nobody"],
            "--updates makes no use of --contenders, --json",
        ),
        (["--updates", "adam", "--distribute", "--memory", "0"], "--updates makes no use of --memory, --distribute"),
        (["--distribute", "--picture", "x.png", "--sweep"], "--distribute makes no use of --picture, --sweep"),
        (["--table", "x.md", "--average", "--model", "vgg16"], "--table makes no use of --model, --average"),
        (["--hosts", "2", "--updates", "adam", "--json", "x"], "--hosts makes no use of --json, --updates"),
        (["--sweep", "--contenders", "ours"], "--sweep makes no use of --contenders"),
        (["--contenders", "tensorpack", "--picture", "x.png"], "--picture draws ratios to ours: name ours"),
        (["--picture", "x.pgn"], "no kind of picture ends in .pgn"),
        (["--updates", "adm"], "did you mean 'adam'"),
    ],
)
def test_bad_arguments_are_one_line_before_anything_is_measured(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(measuring, "measure", None)
    monkeypatch.setattr(measuring, "interleaved", None)
    assert cli.main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and not out


@pytest.mark.parametrize("module", ["tqdm", "tensorflow"])
def test_what_the_bench_needs_is_said_in_words(module, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, module, None)
    assert cli.main(["bench"]) == 2
    words = f'hier-allreduce bench: the bench needs {module}: python -m pip install "hier_allreduce[tf,bench]"\n'
    assert capsys.readouterr().err == words


def test_a_picture_without_matplotlib_is_refused_before_anything_is_measured(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(measuring, "measure", None)
    assert cli.main(["bench", "--picture", str(tmp_path / "x.png")]) == 2
    assert "pictures need matplotlib" in capsys.readouterr().err


def test_the_extras_that_are_named_exist_and_bring_what_the_bench_needs():
    root = Path(cli.__file__).parents[2]
    setup = configparser.ConfigParser()
    setup.read(str(root / "setup.cfg"))
    extras = setup["options.extras_require"]
    assert extras["bench"].split() == ["matplotlib", "tqdm"]
    texts = [path.read_text(encoding="utf-8") for path in (root / "Makefile", *root.glob("hier_allreduce/cli/*.py"))]
    named = {
        extra
        for text in texts
        for names in re.findall(r"(?:'.|allreduce)\[([\w,]+)\]|\"(tf,\w+)\"", text)
        for extra in "".join(names).split(",")
    }
    assert {"tf", "bench", "demo"} < named <= set(extras)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--devices", "0"],
        ["--rounds", "-1"],
        ["--rows", "many"],
        ["--memory", "-1"],
        ["--memory", "inf"],
        ["--memory", "x"],
        ["--json", "/nope/x"],
        ["--table", "nope/x.md"],
        ["--picture", "."],
        ["--shapes", "mine.tsv", "--model", "vgg16"],
    ],
)
def test_counts_and_sizes_are_checked(arguments, capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", *arguments])
    assert arguments[0] in capsys.readouterr().err


def test_steps_are_in_milliseconds_with_quartiles():
    report = made_up(ours=[1.001, 1.002, 1.003], peer=[1.2, 1.3, 1.5])
    assert [bench_report.contender_row(report, measured)[1:3] for measured in report.contenders] == [
        ["2.0", "1.5–2.5"],
        ["300", "250–400"],
    ]
