"""The errors of this package.

::

    HierAllreduceError    mend the input (gradients, devices, strategies, files)
    ├── ClusterError      start the hosts again: one is gone, silent, different or wrongly described
    └── AuditError        stop training: TensorFlow executed something other than the plan

The classes differ in the next step of the program. ``except HierAllreduceError`` catches all of
them; invalid input raises it before the first op is added, unless only the user's own ``transform``
or ``apply_gradients`` can show it. ``ClusterError`` and ``AuditError`` are
also ``RuntimeError``, because a correct program can meet them. None is a ``ValueError``: an
``except ValueError`` around the parsing of data must not hide them, nor must one inside TensorFlow
or Keras.
"""

from __future__ import annotations

_LONGEST = 8000  # characters of a message


class HierAllreduceError(Exception):
    """Invalid input, and the base of all errors of this package.

    A message may quote a file. Its control characters are shown as escapes, because a terminal
    would obey them. Of a message of megabytes both ends are shown.
    """

    # With this constructor a tf.function knows that it can raise the error in its class.
    __init__ = Exception.__init__

    def __str__(self) -> str:
        characters = (
            character if character.isprintable() or character in "\n\t" else repr(character)[1:-1]
            for character in super().__str__()
        )
        text = "".join(characters)
        half = _LONGEST // 2
        return text if len(text) <= _LONGEST else f"{text[:half]} … {text[-half:]}"


class ClusterError(HierAllreduceError, RuntimeError):
    """A host is gone, silent, or builds another graph; or a job's hosts are described wrongly."""


class AuditError(HierAllreduceError, RuntimeError):
    """TensorFlow executed other copies than the planned ones."""
