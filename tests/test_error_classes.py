"""The classes of errors: what catches them, and how they show their text."""

import pytest

from hier_allreduce import AuditError, ClusterError, HierAllreduceError

CLASSES = [HierAllreduceError, ClusterError, AuditError]


@pytest.mark.parametrize("error", CLASSES)
def test_the_base_catches_every_error_and_no_handler_of_bad_data_does(error):
    with pytest.raises(HierAllreduceError):
        try:
            raise error("in the middle of reading data")
        except (ValueError, TypeError):
            pass


def test_errors_that_a_correct_program_can_meet_are_runtime_errors():
    assert [issubclass(error, RuntimeError) for error in CLASSES] == [False, True, True]


@pytest.mark.tf2
@pytest.mark.parametrize("error", CLASSES)
def test_a_tf_function_raises_an_error_in_its_class(error):
    """Autograph would raise a StagingError in place of a class that it cannot make."""
    import tensorflow as tf

    @tf.function
    def fails():
        raise error("inside")

    with pytest.raises(error, match="inside") as caught:
        fails()
    assert type(caught.value) is error


def test_control_characters_of_a_quoted_file_are_shown_as_escapes():
    assert str(ClusterError("a\x1b[31m\n\tb")) == "a\\x1b[31m\n\tb"


def test_of_a_message_of_megabytes_both_ends_are_shown():
    text = str(HierAllreduceError(f"groups={'x' * 1_000_000}: expected tuples of towers"))
    assert len(text) < 10_000
    assert text.startswith("groups=xxx") and text.endswith("xxx: expected tuples of towers")
