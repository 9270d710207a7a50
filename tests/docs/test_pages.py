"""The pages for people name files, headings and code that exist."""

import re

import pytest
from helpers.project import TOP

import hier_allreduce
from hier_allreduce import Strategy
from hier_allreduce.bench import load_model
from hier_allreduce.planning import Spec
from hier_allreduce.planning.buckets import make_buckets

DOCS = sorted(page.relative_to(TOP).as_posix() for page in (TOP / "docs").rglob("*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "examples/README.md", *DOCS]
CODE_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def text_of(page):
    return (TOP / page).read_text(encoding="utf-8")


def anchors(page):
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", CODE_FENCE.sub("", text_of(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_to_files_and_headings(page):
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", CODE_FENCE.sub("", text_of(page))):
        path, _, anchor = link.partition("#")
        target = (TOP / page).parent / path if path else TOP / page
        assert target.exists(), f"{page} links to {link}"
        assert not anchor or anchor in anchors(str(target.resolve().relative_to(TOP))), f"{page} links to {link}"


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])  # that one names files of the past
def test_files_that_pages_name_exist(page):
    folders = (TOP, TOP / "hier_allreduce", TOP / "docs", (TOP / page).parent)
    for name in re.findall(r"(?<![\w./-])((?:[\w.-]+/)+[\w-]+\.(?:py|md|yaml))\b", text_of(page)):
        exists = any((folder / name).exists() for folder in folders)
        assert exists or "NAME" in name, f"{page} names {name}"


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/reference/api.md"])  # makes its own links
def test_names_of_the_package_on_pages_are_public(page):
    """``hier_allreduce.FOLDER.name`` works only once something has imported the folder."""
    names = set(re.findall(r"(?<!from )(?<!import )(?<!-m )\bhier_allreduce\.([a-z]\w*(?:\.\w+)?)", text_of(page)))
    folders = {path.parent.name for path in (TOP / "hier_allreduce").glob("*/__init__.py")}
    others = {name for name in names - folders if name.split(".")[0] not in hier_allreduce.__all__}
    assert {name for name in others if not name.startswith(("errors.", "integrations."))} == set()


def test_the_page_for_contributors_names_code_that_exists():
    sources = [*(TOP / "hier_allreduce").rglob("*.py"), *(TOP / "tests").rglob("*.py")]
    words = set(re.findall(r"\w+", "\n".join(path.read_text(encoding="utf-8") for path in sources)))
    names = re.findall(r"`([A-Za-z_]\w*)`", text_of("CONTRIBUTING.md"))
    assert len(names) > 30
    assert [name for name in names if name not in words] == []


def test_the_page_for_contributors_has_a_row_for_each_folder():
    rows = re.findall(r"^\| `(\w+)/` \|", text_of("CONTRIBUTING.md"), re.MULTILINE)
    assert sorted(rows) == sorted(path.parent.name for path in (TOP / "hier_allreduce").glob("*/__init__.py"))


def test_the_chunks_of_the_defaults_are_those_on_the_page():
    specs = [Spec(shape.elements, 4, "float32") for shape in load_model("resnet50")]
    chunks = len(make_buckets(specs, Strategy().bucketing))
    assert f"they make {chunks} chunks of ResNet-50's gradients" in text_of("docs/reference/hosts.md")
