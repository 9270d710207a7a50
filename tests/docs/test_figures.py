"""The pictures of the pages are what ``make figures`` draws from the code and the measured JSON."""

import sys

import numpy as np
import pytest
from helpers.graphs import IS_TF2
from helpers.project import TOP

FIGURES = TOP / "docs" / "figures"


@pytest.mark.skipif(not IS_TF2, reason="the pictures are drawn with TensorFlow 2")
def test_make_figures_changes_no_picture(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    sys.path.insert(0, str(TOP / "docs" / "generate"))
    import figures

    drawn = figures.draw_all(tmp_path)
    assert {path.name for path in drawn} == {path.name for path in FIGURES.iterdir()}
    # Letters differ by a pixel between minor versions. `make test` installs the one that drew them.
    minor = "version" + ".".join(matplotlib.__version__.split(".")[:2]) + "."
    if not all(minor.encode() in (FIGURES / path.name).read_bytes() for path in drawn):
        pytest.skip(f"another matplotlib than {matplotlib.__version__} drew the pictures")
    # Pixels count, because another library may compress them otherwise.
    changed = [
        path.name
        for path in drawn
        if not np.array_equal(imread(str(path)), imread(str(FIGURES / path.name)))
    ]
    assert not changed, "make figures"
