"""Machines from rows of link kinds, and gradients of shipped models."""

from hier_allreduce.cli.prediction import dense_gradients
from hier_allreduce.models import load_model
from hier_allreduce.topology.machine import from_matrix
from hier_allreduce.topology.matrix import LinkMatrix


def of_kinds(*rows, cpus=(), gpu="", **content):
    """Return a machine from rows such as ``"X NV2"``; by default without affinities and a model."""
    labels = tuple(f"GPU{i}" for i in range(len(rows)))
    kinds = tuple(tuple(row.split()) for row in rows)
    matrix = LinkMatrix(labels, kinds, tuple(cpus) or ("",) * len(rows), (gpu,) if gpu else ())
    return from_matrix(matrix, "test", content)


def all_of(kind, count, **content):
    """Return a machine whose pairs are all of one kind."""
    return of_kinds(
        *(" ".join("X" if i == j else kind for j in range(count)) for i in range(count)), **content
    )


def gradients(model, scale=1.0):
    """Return the dense gradients of a shipped model; ``scale`` makes them larger."""
    grads = dense_gradients(load_model(model))
    return tuple(grad._replace(elements=max(1, int(scale * grad.elements))) for grad in grads)
