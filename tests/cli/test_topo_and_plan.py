"""`hier-allreduce topo` and `plan`: what people see, what programs read, pictures, and errors in one line."""

import contextlib
import io
import json
import os
import re
import struct
import subprocess
import sys
import textwrap

import pytest

from hier_allreduce import HierAllreduceError, figures
from hier_allreduce.cli import entry as cli
from hier_allreduce.cli import machine_picture, plan_picture, topo
from hier_allreduce.cli.describe_plan import sums_by_chunk
from hier_allreduce.cli.plan import read_bytes
from hier_allreduce.formatting import duration, percent
from hier_allreduce.planning import IDLE, best_plan
from hier_allreduce.planning.candidates import candidates
from hier_allreduce.planning.host import backward_pass
from hier_allreduce.planning.plan_file import load_plan
from hier_allreduce.planning.simulator import predicted_seconds
from hier_allreduce.topology import flat_host, load

TABLE = "\tGPU0\tGPU1\tGPU2\nGPU0\t X \tNV2\tPIX\nGPU1\tNV2\t X \tPIX\nGPU2\tPIX\tPIX\t X \n"
MATRIX = "matrix: |2\n" + textwrap.indent(TABLE.expandtabs(6), "  ")


@contextlib.contextmanager
def drawing(draw, *arguments):
    """Axes with what ``draw`` makes of them."""
    figure, axes = figures.pyplot().subplots()
    draw(axes, *arguments)
    yield axes
    figures.pyplot().close(figure)


def read_back(folder, printed):
    """The plan of what ``plan --json`` has printed; reading it checks that it adds up everything."""
    path = folder / "plan.json"
    path.write_text(printed, encoding="utf-8")
    return load_plan(str(path))


@pytest.mark.parametrize("machine", ["dgx-1v", "dgx-2", "pcie-sockets", "h100-nvl-4"])
@pytest.mark.parametrize("size", ["64kB", "100MB"])
def test_json_has_everything_to_run_the_plan(run, tmp_path, machine, size):
    status, out, err = run("plan", machine, "--bytes", size, "--json", "--backward", "0")
    printed = json.loads(out)
    assert (status, err) == (0, "")
    assert printed["devices"] == len(load(machine)) and printed["bytes"] == read_bytes(size)
    plan = read_back(tmp_path, out)
    sizes = [share * printed["bytes"] for share in printed["shares"]]
    assert sum(sizes) == pytest.approx(printed["bytes"])
    assert (plan.copies, plan.sums) == (printed["copies"], printed["sums"])
    assert predicted_seconds(plan, load(machine), sizes) == pytest.approx(printed["idle_seconds"])
    assert printed["bound_seconds"] <= printed["idle_seconds"] == pytest.approx(printed["exposed_seconds"])


def test_a_plan_for_training_leaves_less_exposed(run, tmp_path):
    machine, backward = load("pcie-sockets"), backward_pass(10**8)
    outputs = [run("plan", "pcie-sockets", "--json", *options)[1] for options in ((), ("--backward", "0"))]
    training, idle = map(json.loads, outputs)
    assert (training["backward_seconds"], idle["backward_seconds"]) == (backward.seconds, 0)
    assert max(training["buckets"]) > 0 == max(idle["buckets"])
    assert training["idle_seconds"] > idle["idle_seconds"]
    plans = [read_back(tmp_path, out) for out in outputs]
    ours, others = (predicted_seconds(plan, machine, plan.sizes(10**8), backward) for plan in plans)
    assert training["exposed_seconds"] == pytest.approx(ours) and ours < 0.8 * others
    text = run("plan", "pcie-sockets")[1]
    assert f"after a backward pass of {duration(backward.seconds)} (" in text
    buckets = [int(number) for number in re.findall(r" in (\d+)", text.split("\n")[0].replace(" buckets", ""))]
    assert sum(buckets) == 1 + max(training["buckets"])


def test_a_plan_over_lanes_is_printed_with_what_it_costs(run, tmp_path):
    _, out, _ = run("plan", "dgx-1v", "--bytes", "10MB", "--lanes", "4", "--json")
    printed = json.loads(out)
    plan = read_back(tmp_path, out)
    assert printed["lanes"] == plan.lanes == 4 and printed["copies"] == plan.copies
    _, text, _ = run("plan", "dgx-1v", "--bytes", "10MB", "--lanes", "4", "--steps")
    assert f"to dispatch  {printed['copies']} copies and {printed['sums']} sums, " in text
    assert re.search(r"over 4 lanes, .*\n", text) and "emulated time only" in text and re.search(r"c0  \d\.\d", text)
    _, small, _ = run("plan", "dgx-a100", "--bytes", "1MB", "--lanes", "4")
    assert "over 4 lanes" not in small


def test_the_time_of_the_host_can_be_given(run):
    slow, free = (run("plan", "dgx-1v", "--bytes", "1MB", "--dispatch", time) for time in ("50us", "0"))
    assert " of the host at 50 µs for an op\n" in slow[1] and " of the host" not in free[1]
    printed = json.loads(run("plan", "dgx-1v", "--bytes", "1MB", "--dispatch", "0", "--json")[1])
    assert printed["host_seconds"] == 0


@pytest.mark.parametrize(
    "option",
    ["--lanes=99", "--lanes=-1", "--backward=10", "--backward=61s", "--backward=x", "--dispatch=1", "--dispatch=-1ms"],
)
def test_lanes_and_times_out_of_range_are_refused(run, option):
    with pytest.raises(SystemExit):
        run("plan", "dgx-1v", option)
    assert " 0 to " in run.err()


def test_a_plan_for_people_says_how_near_to_the_bound_it_is(run):
    status, out, _ = run("plan", "dgx-1v", "--bytes", "100MB", "--steps", "--backward", "0")
    found = best_plan(load("dgx-1v"), 10**8, IDLE)
    assert status == 0
    share = percent(found.bound / found.seconds)
    speed = rf"idle machine {duration(found.seconds)} \(.* GB/s\)"
    assert re.search(rf"{speed}, {share} of TensorFlow's limit, \d\d% of the limit of the links\n", out)
    ratios = [float(ratio) for ratio in re.findall(r"  (\d+\.\d\d)x  ", out)]
    assert len(ratios) == 3 and ratios == sorted(ratios) and ratios[0] >= 1
    assert "c0  " in out


def test_the_plan_of_one_algorithm(run):
    _, out, _ = run("plan", "dgx-1v", "--bytes", "1MB", "--algorithm", "tree", "--json")
    families = {candidate.algorithm: candidate.family for candidate in candidates(load("dgx-1v"))}
    assert {families[name] for name in json.loads(out)["algorithm"].split(", ")} == {"tree"}
    status, _, err = run("plan", "dgx-1v", "--algorithm", "rings")
    assert status == 2 and re.search("'rings' is unknown; did you mean 'ring'.*hierarchical.*FILE.py:NAME", err)


def test_machines_from_stdin_and_files_with_own_speeds(run, tmp_path):
    _, piped, _ = run("plan", "-", "--json", stdin="$ nvidia-smi topo -m\n" + TABLE)
    path = tmp_path / "topo.txt"
    path.write_text(TABLE)
    _, read, _ = run("plan", str(path), "--json")
    assert {**json.loads(piped), "machine": "topo"} == json.loads(read)
    own = tmp_path / "own.yaml"
    own.write_text(f"speeds: {{pcie: 1e9}}\n{MATRIX}")
    _, slower, _ = run("plan", str(own), "--json")
    assert json.loads(slower)["exposed_seconds"] > json.loads(read)["exposed_seconds"]


@pytest.mark.parametrize(
    "data", [TABLE.encode("utf-16"), b"\x9b\xff\n" + TABLE.encode(), b"\xef\xbb\xbf" + TABLE.encode()]
)
def test_bytes_that_are_not_quite_utf_8_are_read(run, tmp_path, data):
    path = tmp_path / "topo.txt"
    path.write_bytes(data)
    for status, out, _ in (run("topo", "-", stdin=data), run("topo", str(path))):
        assert status == 0 and "NV2" in out


def test_topo_prints_yaml_that_it_reads_again(run, tmp_path):
    _, out, _ = run("topo", "dgx-1v")
    assert "GPU7" in out and re.search(r"NV2 +8 +45\.6", out) and "At most 26" in out
    written = tmp_path / "dgx.yaml"
    written.write_text(run("topo", "dgx-1v", "--yaml")[1])
    assert run("topo", str(written))[1] == out


def test_topo_says_what_an_nvswitch_shares(run):
    words = r"NVSwitch: each GPU has one port out and one port in, of {} GB/s, that all its NV pairs share\.\n"
    for machine, speed in (("dgx-a100", "264"), ("dgx-2", r"136\.8")):
        assert re.search(words.format(speed), run("topo", machine)[1])
    for mesh in ("hgx-a100-4", "p3.8xlarge", "dgx-1v"):
        assert "NVSwitch" not in run("topo", mesh)[1]


@pytest.mark.parametrize(
    "links, words",
    [("GPU6-GPU7: 10e9", "10 or 45.6"), ("GPU6-GPU7: 9e9, GPU5-GPU6: 10e9", "9 to 45.6"), ("NV2: 40e9", "40")],
)
def test_text_and_picture_agree_on_pairs_of_other_speed(run, tmp_path, links, words):
    path = tmp_path / "own.yaml"
    path.write_text(f"{load('dgx-1v').to_yaml()}links: {{{links}}}\n")
    assert re.search(f"NV2 +8 +{words}\n", run("topo", str(path))[1])
    with drawing(machine_picture.draw_legend, load(str(path))) as axes:
        assert f"NV2  {words} GB/s each way" in [text.get_text() for text in axes.get_legend().get_texts()]


def test_warnings_are_printed(run):
    odd = TABLE.replace("GPU1\tNV2", "GPU1\tNV1")
    for command in ("topo", "plan"):
        _, out, _ = run(command, "-", stdin=odd)
        assert "warning: GPU0–GPU1: row GPU0 says NV2, row GPU1 says NV1; using NV1" in out
    _, out, _ = run("plan", "-", "--json", stdin=odd)
    assert "GPU0–GPU1" in json.loads(out)["warnings"][0]


def test_whose_speeds_were_guessed_is_said_where_no_gpu_is_named(run, tmp_path):
    words = (
        "speeds as of {} (guessed from the links; give `gpu:`, or put `nvidia-smi -L` above the table and"
        " `nvidia-smi topo -p2p r` below it)\n"
    )
    for command in ("topo", "plan"):
        assert run(command, "-", stdin=TABLE)[1].endswith(words.format("V100 GPUs"))
    _, text, _ = run("topo", "-", "--yaml", stdin=TABLE)
    assert "guessed" not in text
    pcie = TABLE.replace("NV2", "SYS")
    assert run("topo", "-", stdin=pcie)[1].endswith(words.format("GPUs with PCIe ports of 12 GB/s"))
    unknown = "GPU 0: NVIDIA R100 (UUID: GPU-aa)\n" + TABLE
    assert run("topo", "-", stdin=unknown)[1].endswith(words.format("V100 GPUs"))
    for known in ("GPU 0: Tesla V100 (UUID: GPU-aa)\n" + TABLE, "\tGPU0\nGPU0\t X \n"):  # named; without links
        assert "guessed" not in run("topo", "-", stdin=known)[1]
    for command in ("topo", "plan"):
        assert "guessed" not in run(command, "dgx-1v")[1]
    given = tmp_path / "given.yaml"
    given.write_text(f"speeds: {{nvlink: 30e9}}\nlinks: {{PIX: 11e9}}\n{MATRIX}")
    assert "guessed" not in run("topo", str(given))[1]


def test_one_gpu_needs_no_plan(run):
    alone = "\tGPU0\tCPU Affinity\nGPU0\t X \t0-7\n"
    assert run("topo", "-", stdin=alone)[0] == 0
    printed = json.loads(run("plan", "-", "--json", stdin=alone)[1])
    assert (printed["steps"], printed["exposed_seconds"], printed["idle_seconds"]) == ([], 0.0, 0.0)
    assert "nothing to reduce" in run("plan", "-", stdin=alone)[1]


@pytest.mark.filterwarnings("error::UserWarning", "error::RuntimeWarning")
def test_one_gpu_has_a_picture_too(run, tmp_path):
    path = tmp_path / "x.png"
    alone = "\tGPU0\tCPU Affinity\nGPU0\t X \t0-7\n"
    assert run("plan", "-", "--picture", str(path), stdin=alone)[0] == 0
    assert path.stat().st_size > 1000


def test_where_nothing_is_reduced_there_is_no_axis_of_time():
    found = best_plan(flat_host(1), 10**7)
    with drawing(plan_picture.draw_timeline, found.timing(), found) as axes:
        assert [text.get_text() for text in axes.texts] == ["nothing to reduce"] and not axes.axison


def test_what_is_very_small_is_said_to_be(run):
    _, out, _ = run("plan", "-", "--bytes", "1", stdin="\tGPU0\tGPU1\nGPU0\t X \tNV2\nGPU1\tNV2\t X \n")
    limits = "under 1% of TensorFlow's limit, under 1% of the limit of the links"
    assert re.search(rf"idle machine \d+ µs \(\d\d\.\d* kB/s\), {limits}\n", out)
    assert " after a backward pass of under 0.01 µs (" in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["topo", "dgx1v"], "did you mean 'dgx-1v'?"),
        (["plan", "dgx-1"], "did you mean 'dgx-1v' or 'dgx-1p'?"),
        (["plan", "dgx-1v", "--picture", "plan.pgn"], "'plan.pgn': no kind of picture ends in .pgn; there are"),
        (["topo", "dgx-1v", "--picture", "plan.pgn"], "'plan.pgn': no kind of picture ends in .pgn; there are"),
        (["topo", "--list", "dgx-1v", "--yaml"], "--list makes no use of TOPOLOGY, --yaml; give one or the other"),
        (["topo", "--list", "--picture", "x.png", "--yaml"], "--list makes no use of --picture, --yaml;"),
        (["plan", "dgx-1v", "--json", "--steps"], "--json makes no use of --steps"),
        (["topo", "-"], "no table of GPUs"),
    ],
)
def test_errors_are_one_line_and_come_first(run, arguments, message):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert message in err and err.count("\n") == 1 and err.startswith(f"hier-allreduce {arguments[0]}: ")


def test_what_an_encoding_lacks_is_printed_as_a_question_mark(monkeypatch):
    output = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")  # Windows', into a file
    with monkeypatch.context() as patched:
        patched.setattr("sys.stdout", output)
        assert cli.main(["plan", "pcie-pairs", "--bytes", "1MB"]) == 0
    printed = output.buffer.getvalue().decode("cp1252")
    assert "next best" in printed
    assert re.search(r"^[\d,]+\?\d ", printed, re.M)  # 1,2→0


@pytest.mark.parametrize("command", ["topo", "plan"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_ends_early_costs_no_picture(tmp_path, command, unbuffered):
    reading, writing = os.pipe()
    os.close(reading)  # as `| head` does, sooner or later
    call = [sys.executable, "-m", "hier_allreduce", command, "p3.8xlarge", "--picture", "x.png"]
    how = {"cwd": str(tmp_path), "env": {**os.environ, "PYTHONUNBUFFERED": unbuffered}, "timeout": 280}
    with open(writing, "wb") as pipe:
        done = subprocess.run(call, stdout=pipe, stderr=subprocess.PIPE, **how)
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "x.png").stat().st_size > 1000


@pytest.mark.parametrize("command", ["topo", "plan"])
def test_an_impossible_picture_is_refused_before_the_work(run, monkeypatch, tmp_path, command):
    monkeypatch.setattr(topo, "load", None)  # nothing is looked up
    for path, words in (("nowhere/at/all.png", "there is no folder 'nowhere/at'"), (str(tmp_path), "not a folder")):
        with pytest.raises(SystemExit):
            run(command, "dgx-1v", "--picture", path)
        assert words in run.err()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, err = run(command, "dgx-1v", "--picture", str(tmp_path / "x.png"))
    assert (status, err) == (2, f"hier-allreduce {command}: pictures need matplotlib: pip install matplotlib\n")


@pytest.mark.parametrize(
    "text, size",
    [
        ("100MB", 10**8),
        ("64 kB", 64_000),
        ("10MiB", 10 << 20),
        ("1.5GB", 1_500_000_000),
        ("4096", 4096),
        ("1e+6", 10**6),
        ("1TB", 10**12),
    ],
)
def test_bytes_are_read_with_their_units(text, size):
    assert read_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1MB", "many", "1TBs", "1e400", "2e15"])
def test_bytes_that_are_none_are_refused(run, text):
    with pytest.raises(SystemExit):
        run("plan", "dgx-1v", f"--bytes={text}")


@pytest.mark.parametrize("machine", ["dgx-1v", "pcie-sockets", "dgx-2"])
def test_pictures_are_drawn(run, tmp_path, machine):
    for command, *options in (["topo"], ["plan", "--bytes", "1MB"]):
        path = tmp_path / f"{command}.png"
        assert run(command, machine, *options, "--picture", str(path))[0] == 0
        head = path.read_bytes()[:24]
        assert head[:8] == b"\x89PNG\r\n\x1a\n"
        assert min(struct.unpack(">II", head[16:24])) > 700


def test_every_link_is_a_line_and_the_fastest_are_on_top():
    with drawing(machine_picture.draw_machine, load("dgx-1v")) as axes:
        colors = [line.get_color() for line in axes.lines]
    far, one, two = dict.fromkeys(colors)
    assert colors == [far] * 12 + [one] * 8 + [two] * 8
    assert (one, two) == figures.COLORS[:2]
    right = [x > 0 for x, _ in machine_picture.device_positions(load("dgx-1v"))]
    assert right == [True] * 4 + [False] * 4  # a socket on each side


def test_used_links_are_drawn_over_unused_ones():
    machine = load("pcie-switch")
    with drawing(machine_picture.draw_link_bytes, machine, {(0, 1): 10.0, (7, 6): 5.0}) as axes:
        colors = [line.get_color() for line in axes.lines]
        assert colors == [figures.PALE] * 26 + [figures.INK] * 2


def test_text_can_be_read_on_every_color():
    assert [figures.ink_on(color) == "white" for color in figures.COLORS] == [True] * 3 + [False] * 4 + [True]


def test_every_copy_has_a_bar_in_the_colour_of_its_lane():
    found = best_plan(load("dgx-1v"), 10**7, lanes=4)
    plan = found.plan
    with drawing(plan_picture.draw_timeline, found.timing(), found) as axes:
        assert plan.lanes == 4 and len(axes.patches) == plan.copies
        colors = {patch.get_facecolor()[:3] for patch in axes.patches}
        assert len(colors) == len({plan.device_name(src).partition(".")[2] for src, _ in plan.transfers()})


def test_the_timeline_has_a_bar_for_every_copy_and_sum():
    for backward in (IDLE, None):
        found = best_plan(load("dgx-1v"), 10**7, backward)
        with drawing(plan_picture.draw_timeline, found.timing(), found) as axes:
            assert len(axes.patches) == found.plan.copies + found.plan.sums
            begin, end = axes.get_xlim()
            assert max(patch.get_x() + patch.get_width() for patch in axes.patches) <= end > begin


@pytest.mark.parametrize("machine, many", [("dgx-2", True), ("dgx-1v", False)])
def test_a_color_means_one_way_and_grey_those_not_shown(machine, many):
    found = best_plan(load(machine), 10**9, IDLE)
    colors, ways = plan_picture.way_colors(found.plan), len(set(sums_by_chunk(found.plan).values()))
    assert (ways > 8) == many
    assert len(colors) == ways and len(set(colors.values())) == min(ways, 9)
    with drawing(plan_picture.draw_timeline, found.timing(), found) as axes:
        assert len({patch.get_facecolor()[:3] for patch in axes.patches}) == min(ways, 9)
        assert ("pale grey: the ways not shown" in axes.get_xlabel()) == (ways > 8)


@pytest.mark.parametrize("ending", ["pgf", "raw"])
def test_endings_that_need_latex_or_are_no_pictures_are_refused(run, tmp_path, ending):
    status, _, err = run("topo", "p3.8xlarge", "--picture", str(tmp_path / f"x.{ending}"))
    assert status == 2 and f"no kind of picture ends in .{ending}" in err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name, written", [("x.svg", "x.svg"), ("x.PDF", "x.PDF"), ("x", "x.png")])
def test_a_picture_is_written_whole_or_not_at_all(tmp_path, name, written):
    figure, axes = figures.pyplot().subplots()
    figures.save_picture(figure, str(tmp_path / name))
    assert (tmp_path / written).stat().st_size > 500
    (tmp_path / written).unlink()

    def broken(renderer):
        raise ValueError("no ink")

    axes.title.draw = broken
    with pytest.raises(HierAllreduceError, match="no ink"):
        figures.save_picture(figure, str(tmp_path / name))
    assert not list(tmp_path.iterdir())
