"""The pictures of the pages are what ``make figures`` draws from the code and the measured JSON."""

import sys

import pytest
from helpers.graphs import IS_TF2
from helpers.project import TOP

FIGURES = TOP / "docs" / "figures"


@pytest.mark.skipif(not IS_TF2, reason="the pictures are drawn with TensorFlow 2")
def test_make_figures_changes_no_picture(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    sys.path.insert(0, str(TOP / "docs" / "generate"))
    import figures

    drawn = figures.draw_all(tmp_path)
    assert {path.name for path in drawn} == {path.name for path in FIGURES.iterdir()}
    software = f"Matplotlib version{matplotlib.__version__},".encode()
    if not all(software in shown(path.name) for path in drawn):
        pytest.skip(f"matplotlib {matplotlib.__version__} did not draw them: make figures")
    changed = [path.name for path in drawn if path.read_bytes() != shown(path.name)]
    assert not changed, "make figures"


def shown(name):
    """Return the bytes of a picture on the pages."""
    return (FIGURES / name).read_bytes()
