"""Searches are kept in files for other processes; whatever else is in those files changes no plan."""

import json

import pytest

from hier_allreduce.planning import cache, planner, spanning_trees
from hier_allreduce.planning.planner import choose
from hier_allreduce.topology import load

MACHINE, SIZE = load("p3.8xlarge"), 1 << 20
CACHED = (planner._search, planner._best_of, planner._timed_baselines, spanning_trees.pack)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path))
    as_another_process()
    yield tmp_path / "searches"
    as_another_process()


def as_another_process():
    for function in CACHED:
        function.cache_clear()


def search_is_refused(monkeypatch):
    for module, name in ((planner, "candidates"), (planner, "_least"), (spanning_trees, "_linprog")):
        monkeypatch.setattr(module, name, None)


@pytest.mark.parametrize("algorithm", [None, "packed_trees"])
def test_another_process_reads_the_same_plan_without_a_search(folder, monkeypatch, algorithm):
    first = choose(MACHINE, SIZE, algorithm)
    as_another_process()
    search_is_refused(monkeypatch)
    assert choose(MACHINE, SIZE, algorithm) == first
    assert not list(folder.glob("*.part"))
    with pytest.raises(TypeError):  # another size is another search
        choose(MACHINE, 64 * SIZE, algorithm)


def change(folder, function, edit):
    """Edit the kept results of a function."""
    for path in folder.glob("*.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["of"].startswith(f"{function} "):
            edit(content["result"])
            path.write_text(json.dumps(content), encoding="utf-8")


def swap_two_sources(result):
    (srcs, dst), *rest = result[0][0]["halves"][0]
    result[0][0]["halves"][0] = [[[dst], srcs[0]], *rest]


DAMAGE = {
    "cut": lambda folder: [path.write_bytes(path.read_bytes()[:100]) for path in folder.glob("*.json")],
    "empty": lambda folder: [path.write_bytes(b"") for path in folder.glob("*.json")],
    "another format": lambda folder: [path.write_text("[1, 2]") for path in folder.glob("*.json")],
    "deep": lambda folder: [path.write_text("[" * 100_000) for path in folder.glob("*.json")],
    "a wrong sum": lambda folder: change(folder, "_search", swap_two_sources),
    "shares of more than all": lambda folder: change(folder, "_search", lambda r: r[0][0].update(fractions=[2.0])),
    "another machine": lambda folder: change(folder, "_search", lambda r: r[0][0].update(devices=5)),
    "an unknown field": lambda folder: change(folder, "_search", lambda r: r[0][0].update(faster=True)),
    "no tree": lambda folder: change(folder, "_best_packing", lambda r: r["trees"][0].pop()),
    "an impossible rate": lambda folder: change(folder, "_best_packing", lambda r: r.update(rate=-1.0)),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_ignored_and_written_anew(folder, damage):
    first = choose(MACHINE, SIZE)
    kept = {path: path.read_bytes() for path in folder.glob("*.json")}
    damage(folder)
    assert any(path.read_bytes() != content for path, content in kept.items())
    as_another_process()
    assert choose(MACHINE, SIZE) == first
    assert {path: path.read_bytes() for path in folder.glob("*.json")} == kept


def test_another_version_of_the_planner_searches_itself(folder, monkeypatch):
    choose(MACHINE, SIZE)
    files = len(list(folder.iterdir()))
    as_another_process()
    monkeypatch.setattr(cache, "_source", lambda: "other modules")
    choose(MACHINE, SIZE)
    assert len(list(folder.iterdir())) == 2 * files


def test_a_folder_that_cannot_be_written_changes_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    as_another_process()
    expected = choose(MACHINE, SIZE)
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "file"))
    as_another_process()
    assert choose(MACHINE, SIZE) == expected


def test_the_folder_is_the_systems_and_an_empty_variable_turns_the_cache_off(monkeypatch, tmp_path):
    monkeypatch.setenv(cache.CACHE_VARIABLE, "")
    assert cache.cache_folder() is None
    monkeypatch.delenv(cache.CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_folder().name == "hier_allreduce"
