"""Tables of gradient shapes: the shipped ones, a user's own, and invalid ones."""

import pytest

from hier_allreduce import presets
from hier_allreduce.bench import models
from hier_allreduce.errors import HierAllreduceError

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
    table = models.load_model(model)
    assert len({shape.name for shape in table}) == len(table)
    if model in PARAMETERS:
        assert sum(shape.elements for shape in table) == PARAMETERS[model]


def test_the_embeddings_of_dlrm_are_sparse():
    table = models.load_model("dlrm_criteo_kaggle")
    assert [shape.name for shape in table if shape.sparse] == [f"emb_{n}" for n in range(26)]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])  # the second is what Windows writes
@pytest.mark.parametrize("first", ["", "# mine\n"])
def test_a_table_of_ones_own(tmp_path, first, encoding):
    path = tmp_path / "mine.tsv"
    path.write_text(f"{first}name\tshape\tdtype\tsparse\na\t3,\x1f4\tfloat16\t\nb\t\tint64\tno\nc\tscalar\tfloat64\t\n"
                    "\nd\t9,2\tfloat32\tyes\n", encoding=encoding)  # fmt: skip
    table = models.load_model(str(path))
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
        (HEADER + "a\t3,²\tfloat32\n", "line 2: shape '3,²'; expected whole numbers"),
        (HEADER + "a\t" + "9" * 5000 + "\tfloat32\n", "line 2: shape '99999"),
        (HEADER + "a\t-1\tfloat32\n", "line 2: shape '-1'"),
        (HEADER + "a\t1\tflaot32\n", "line 2: dtype 'flaot32'; did you mean 'float32'"),
        ("name\tshape\tdtype\tsparse\na\t1\tfloat32\tperhaps\n", "line 2: sparse is 'perhaps'"),
        ("name\tshape\tdtype\tsparse\na\t\tfloat32\tyes\n", "line 2: a scalar has no rows"),
    ],
)
def test_a_bad_table_is_refused_with_its_line(tmp_path, text, message):
    path = tmp_path / "bad.tsv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(HierAllreduceError, match=message):
        models.load_model(str(path))


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "bad.tsv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HierAllreduceError, match="not readable as text"):
        models.load_model(str(path))
