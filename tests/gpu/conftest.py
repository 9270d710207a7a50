"""The devices of tests/gpu: 8 logical GPUs with ``--split-gpu 8`` (``make test-gpu``), else 8 logical CPU devices."""

import pytest
from helpers.graphs import cpus

from hier_allreduce import HierAllreduceError
from hier_allreduce.logical import split_gpu

MEMORY = 512 << 20  # bytes of each; a demo in a process of its own takes most of the rest


@pytest.fixture(scope="session")
def devices(request):
    """Return 8 devices."""
    parts = request.config.getoption("split_gpu")
    if not parts:
        return cpus(8)
    try:
        return split_gpu(parts, MEMORY)
    except HierAllreduceError as error:
        pytest.exit(f"tests/gpu needs a GPU: {error}", returncode=2)


@pytest.fixture
def on_gpus(request):
    """Skip a test that other folders have on CPU devices."""
    if not request.config.getoption("split_gpu"):
        pytest.skip("on GPUs only: tests/cli and tests/integrations have it on CPU devices")
