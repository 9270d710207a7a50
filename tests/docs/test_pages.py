"""Pages agree with the repository: links, outputs of commands, words and numbers of the code."""

import json
import re
import sys
from statistics import median
from typing import Dict, List

import pytest
import yaml
from helpers.project import TOP

import hier_allreduce
from hier_allreduce import HierAllreduceError
from hier_allreduce.planning.algorithms import schedules_of
from hier_allreduce_tools.entry import main

DOCS = sorted(page.relative_to(TOP).as_posix() for page in (TOP / "docs").rglob("*.md"))
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "RELEASING.md",
    "benchmarks/README.md",
    "benchmarks/results/README.md",
    "benchmarks/results/published/README.md",
    "benchmarks/results/real/README.md",
    "examples/README.md",
    "tests/emulated_gpu/README.md",
    *DOCS,
]
CODE_FENCE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)


def text_of(page):
    return (TOP / page).read_text(encoding="utf-8")


def anchors(page):
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", CODE_FENCE.sub("", text_of(page)), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page):
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", CODE_FENCE.sub("", text_of(page))):
        path, _, anchor = link.partition("#")
        target = (TOP / page).parent / path if path else TOP / page
        assert target.exists(), f"{page} links to {link}"
        assert not anchor or anchor in anchors(str(target.resolve().relative_to(TOP))), (
            f"{page} links to {link}"
        )


# a docstring names a file of tensorpack
WITH_NAMES = sorted({*PAGES} - {"docs/reference/api.md"})


@pytest.mark.parametrize("page", [*WITH_NAMES, "Makefile", ".ci/test-compat", ".ci/run"])
def test_files_and_names_on_pages_exist(page):
    package, tools = TOP / "hier_allreduce", TOP / "tools" / "hier_allreduce_tools"
    folders = (TOP, package, tools, TOP / "docs", (TOP / page).parent)
    for name in re.findall(r"(?<![\w./-])((?:[\w.-]+/)+[\w-]+\.(?:py|md|yaml))\b", text_of(page)):
        assert "NAME" in name or any((folder / name).exists() for folder in folders), (
            f"{page} names {name}"
        )
    for command in re.findall(r"\bhier-allreduce (\w+)", text_of(page)):
        assert command in ("doctor", "tune"), f"{page} names the command {command}"
    for name in re.findall(r"\b(?:hier_allreduce|h)\.([a-z]\w+)\(", text_of(page)):
        assert name in hier_allreduce.__all__, f"{page} names hier_allreduce.{name}"


@pytest.mark.parametrize("page", PAGES)
def test_tables_have_a_header_and_rows_of_its_length(page):
    text = CODE_FENCE.sub("", text_of(page))
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = table.splitlines()
        assert len(rows) > 2 and re.match(r"^\|( ?-+ ?\|)+$", rows[1]), f"{page}: {rows[0]}"
        cells = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]  # GitHub cuts in code too
        assert len(set(cells)) == 1, f"{page}: {rows[cells.index(min(cells))]}"


def test_badges_say_what_is_installed():
    badge = re.compile(r"^\[!\[(\w+) (.*?)\]\(\S+/badge/", re.MULTILINE)
    badges = dict(badge.findall(text_of("README.md")))
    setup = text_of("setup.cfg")
    oldest, first, *_, last = re.findall(r"Python :: (3\.\d+)", setup)
    assert badges["Python"] == f"{oldest}, and {first} to {last}"
    assert f"license = {badges['Licence'].replace(' ', '-')}\n" in setup
    of_tf2, of_tf1 = re.findall(r"tensorflow(?:-cpu>|=)=(\d+\.\d+)", setup)
    assert re.match(rf"{of_tf2} to 2\.\d+, and {of_tf1}$", badges["TensorFlow"])


def test_measured_numbers_are_those_of_the_committed_results():
    sys.path.insert(0, str(TOP / "docs" / "generate"))
    import measured
    import real_steps

    for page in real_steps.PAGES:
        text = text_of(page)
        assert "<!-- real: " in text
        assert real_steps.with_table(text) == text, f"{page}: python docs/generate/real_steps.py"
    for page in measured.PAGES:
        text = text_of(page)
        assert "<!-- measured: " in text
        assert measured.with_tables(text) == text, f"{page}: python docs/generate/measured.py"


def test_steps_on_cpu_devices_are_those_that_were_printed():
    printed = (TOP / "benchmarks/results/cpu-devices.txt").read_text(encoding="utf-8")
    section = text_of("docs/measured.md").split("## 3. CPU devices")[1].split("\n## ")[0]
    rows = re.findall(
        r"^\| .*?, (sum|mean) \| ([\d.]+) \| ([\d.]+) \(.* \| ([\d.]+) \|$", section, re.MULTILINE
    )
    assert len(rows) == 4
    for part, (kind, ours, other, ratio) in zip(printed.split("\n\n")[1:], rows):
        assert f", {kind} of " in part and part.rstrip().endswith(f": {ratio}")
        steps = re.findall(r"^\S.*?  +([\d.]+) ", part, re.MULTILINE)
        assert ours == steps[0] and other == min(steps[1:], key=float)


def test_build_times_are_those_of_the_committed_results():
    ratios: Dict[str, List[float]] = {"cpu": [], "gpu": []}
    for run in json.loads((TOP / "benchmarks/results/build-time.json").read_text("utf-8")):
        ours, other = (median(run["seconds"][name]) for name in ("ours", "ReductionToOneDevice"))
        ratios[run["devices"]].append(ours / other)
    cpu, gpu = (f"{min(of):.1f} to {max(of):.1f}" for of in (ratios["cpu"], ratios["gpu"]))
    text = " ".join(text_of("docs/measured.md").split())
    assert f"take {cpu} of the time of `ReductionToOneDevice`'s to build on CPU devices" in text
    assert f"and {gpu} on GPUs" in text


# a number with the unit of a measurement, and the head of a column of such numbers
MEASURED = re.compile(r"\d (?:ms|µs|GB/s|TB/s)\b|, ms \|")
KINDS = re.compile(r"\b(?:real|H100|chip|emulated|CPU devices|assumed)\b")
SOURCES = re.compile(
    r"\bpython benchmarks/\w|\bmake bench\b|`\w+\.py|\(https:|results/|#how-well-it"
)


@pytest.mark.parametrize(
    "page",
    ["README.md", "benchmarks/README.md", "benchmarks/results/published/README.md", *DOCS],
)
def test_measured_numbers_have_their_kind_and_their_source(page):
    """Real, emulated, on CPU devices or assumed; and a command, committed results or a link."""
    for section in re.split(r"^##+ ", text_of(page), flags=re.MULTILINE):
        if MEASURED.search(CODE_FENCE.sub("", section)):
            title = section.split("\n")[0]
            assert KINDS.search(section), f"{page}, {title}: of what kind are the numbers?"
            assert SOURCES.search(section), f"{page}, {title}: no command, no results, no link"


@pytest.mark.parametrize("page", ["README.md", *DOCS])
def test_outputs_on_pages_are_those_of_the_commands(page, capsys):
    """``<!-- output: COMMAND -->`` marks lines of the output of ``hier-allreduce COMMAND``."""
    for command, shown in re.findall(
        r"<!-- output: (.*?) -->\n```output\n(.*?)```", text_of(page), re.DOTALL
    ):
        assert main(command.split()) == 0
        assert shown in capsys.readouterr().out, f"{page}: hier-allreduce {command}"


def test_the_error_of_the_own_algorithm_is_on_its_page():
    page = text_of("docs/how-to/own-algorithm.md")
    shown = re.findall(r"<!-- error: .*? -->\n```output\n(.*?)\n```", page, re.DOTALL)[0]
    names = {"Copy": hier_allreduce.Copy, "Reduce": hier_allreduce.Reduce}
    exec(re.findall(r"def chain.*?\n\n\n", page, re.DOTALL)[0], names)

    def chain(devices, chunk):
        return list(names["chain"](devices, chunk))[:-1]

    with pytest.raises(HierAllreduceError) as caught:
        schedules_of(chain, 4)
    assert str(caught.value) == shown


def test_keys_of_shipped_files_are_on_their_page():
    names = set(re.findall(r"`([\w-]+)`", text_of("docs/reference/files.md")))
    for path in (TOP / "configs" / "strategies").glob("*.yaml"):
        assert set(yaml.safe_load(path.read_text(encoding="utf-8"))) <= names, path
        assert path.stem in names, path


def test_every_public_name_is_in_the_api_reference():
    page = text_of("docs/reference/api.md")
    named = set(re.findall(r"^<!-- reference: .*?\.(\w+) -->$", page, re.MULTILINE))
    errors = {name for name in hier_allreduce.__all__ if name.endswith("Error")}
    public = {*hier_allreduce.__all__, "Cost", "CostCallback", "CostHook", "cost"}
    assert public - errors | {"errors"} <= named
    assert errors <= set(re.findall(r"^### class (\w+)$", page, re.MULTILINE))


def test_the_reference_is_what_the_code_says():
    pytest.importorskip("griffe", reason="pip install '.[docs]', with Python 3.9 or newer")
    sys.path.insert(0, str(TOP / "docs" / "generate"))
    import reference

    for page in reference.PAGES:
        assert reference.with_parts(text_of(page)) == text_of(page), f"{page}: make reference"
    texts = text_of("docs/reference/commands.md") + text_of("docs/reference/files.md")
    assert {"--copies", "--minutes"} <= set(re.findall(r"--[\w-]+", texts))
    assert all(f"| `{key}` |" in texts for key in hier_allreduce.Strategy.__dataclass_fields__)
    assert not re.findall(r":\w+:`", texts + text_of("docs/reference/api.md"))


def test_the_page_for_contributors_names_folders_and_code_that_exist():
    page = text_of("CONTRIBUTING.md")
    for folder in (path.parent.name for path in (TOP / "hier_allreduce").glob("*/__init__.py")):
        assert f"{folder}/" in page or f" {folder} " in page
    folders = (TOP / "hier_allreduce", TOP / "tools")
    sources = [path for folder in folders for path in folder.rglob("*.py")]
    words = set(re.findall(r"\w+", "\n".join(path.read_text(encoding="utf-8") for path in sources)))
    names = re.findall(r"`([A-Za-z_]\w*)`", page)
    assert len(names) > 20 and [name for name in names if name not in words] == []


def test_each_stop_of_the_road_is_in_the_file_that_the_page_names():
    table = text_of("CONTRIBUTING.md").split("| stops | file |")[1].split("\n\n")[0]
    stops = re.findall(r"`(\w+)`:([^|;]*)", table)
    for file, functions in stops:
        names = re.findall(r"\w+", functions)
        sources = [
            TOP / "hier_allreduce" / folder / f"{file}.py" for folder in ("graph", "planning")
        ]
        text = next(path for path in sources if path.exists()).read_text(encoding="utf-8")
        assert all(re.search(rf"def {name}\b", text) for name in names), f"{file}: {names}"
    assert len(stops) >= 8 and len({file for file, _ in stops}) <= 8
    assert int(re.findall(r"^\| (?:\d+–)?(\d+) \|", table, re.MULTILINE)[-1]) <= 20
