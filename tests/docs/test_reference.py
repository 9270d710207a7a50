"""The generated parts of the documentation: commands, keys of files, the schema of plans, measurements."""

import ast
import importlib.util
import json
import re
import sys

import jsonschema
import pytest
import yaml
from helpers.project import TOP

import hier_allreduce
from hier_allreduce.cli.entry import main

DOCS = TOP / "docs"
SCHEMA = json.loads((DOCS / "reference" / "plan.schema.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def reference():
    spec = importlib.util.spec_from_file_location("reference", str(DOCS / "generate" / "reference.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_include_what_exists(reference):
    texts = [page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md")]
    named = {name for text in texts for name in re.findall(r"<!-- include: ([\w-]+) -->", text)}
    assert named == set(reference.INCLUDED)


def test_every_public_name_is_in_the_api_reference():
    page = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    named = {line.rpartition(".")[2] for line in page.splitlines() if line.startswith("::: ")}
    errors = {name for name in hier_allreduce.__all__ if name.endswith("Error")}
    assert set(hier_allreduce.__all__) - errors <= named
    assert "::: hier_allreduce.errors" in page


@pytest.mark.parametrize("command", ["topo", "plan", "launch"])
def test_every_option_of_a_command_is_in_the_reference(reference, command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    options = set(re.findall(r"^ +(?:-\w[^-]*, )?(--[\w-]+)", capsys.readouterr().out, re.MULTILINE)) - {"--help"}
    section = reference.commands().split(f"\n## {command}\n" if command != "topo" else "## topo\n")[1].split("\n## ")[0]
    assert options and all(f"{option}" in section for option in options)


@pytest.mark.parametrize(
    "kind, heading",
    [("strategies", "strategy"), ("trainers", "trainer"), ("clusters", "cluster")],
)
def test_every_key_of_the_shipped_files_is_in_the_reference(reference, kind, heading):
    section = reference.files_page().split(f"## A {heading}\n")[1].split("\n## ")[0]
    explained = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    for path in (TOP / "configs" / kind).glob("*.yaml"):
        assert set(yaml.safe_load(path.read_text(encoding="utf-8"))) <= explained, path


def test_every_argument_of_the_trainer_is_in_the_reference(reference):
    source = TOP / "hier_allreduce" / "integrations" / "tensorpack" / "trainer.py"  # needs tensorpack when imported
    functions = [node for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))) if hasattr(node, "args")]
    init = next(node for node in functions if getattr(node, "name", "") == "__init__")
    assert {argument.arg for argument in init.args.args} - {"self"} == set(reference._TRAINER)


def test_a_key_without_an_explanation_stops_the_site(reference, monkeypatch):
    monkeypatch.setitem(reference.config._FIELDS, "colour", None)
    with pytest.raises(KeyError, match="colour"):
        reference.files_page()


def test_tables_show_no_markup(reference):
    assert not re.findall(r":\w+:`|\\\|", reference.files_page() + reference.commands())


def test_plans_fit_their_schema(capsys):
    assert main(["plan", "pcie-switch", "--bytes", "1MB", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert set(plan) == set(SCHEMA["properties"])
    jsonschema.validate(plan, SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**plan, "chunks": "two"}, SCHEMA)


def test_the_keys_of_plans_are_explained(reference):
    table = reference.plan_schema()
    assert all(f"| `{key}` |" in table for key in SCHEMA["properties"])


@pytest.mark.skipif(sys.version_info < (3, 8), reason="SciPy for Python 3.7 packs other trees now and then")
def test_the_tutorial_shows_what_plan_prints(capsys):
    page = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    command, shown = re.search(r"hier-allreduce (plan dgx-1v .*?)\n.*?```\n(DGX-1V .*?)```", page, re.DOTALL).groups()
    assert main(command.split()) == 0
    assert capsys.readouterr().out.startswith(shown)


@pytest.mark.parametrize("name", ["measurements", "defaults"])
def test_the_ratios_on_a_page_are_those_of_its_data(reference, name):
    page = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    summary = page.split("<!-- summary -->\n")[1].split("<!-- end of summary -->")[0].strip()
    assert summary == reference.summary(name)
