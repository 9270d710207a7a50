"""The whole calibration with TensorFlow's copies, on CPU devices: what moves, what is written, and who reads it."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.graphs import cpus, executed

from hier_allreduce import Strategy, calibrate
from hier_allreduce.calibration.device_timer import DeviceTimer
from hier_allreduce.calibration.timer import Transfer
from hier_allreduce.cli import main
from hier_allreduce.errors import HierAllreduceError

pytestmark = pytest.mark.xdist_group("calibration")


def test_receivers_get_the_bytes_that_are_timed():
    timer = DeviceTimer(cpus(3), 1 << 20)
    try:
        ends = timer.together([Transfer(0, 1, 4096), Transfer(2, 0, 8220)])
        with timer._graph.as_default():
            slots = [tf.raw_ops.ReadVariableOp(resource=timer._slots[device], dtype="float32") for device in (1, 0)]
        received = timer._session.run(slots)
        assert [value.shape for value in received] == [(1024,), (2048,)]
        assert all(np.all(value == 1) for value in received)
        assert len(ends) == 2 and min(ends) > 0
        assert timer.trains([(0, 1)], 9, 4096) > 0 and timer.hops(8, 4096) > 0 and timer.sums(8, 9, 4096) > 0
        assert timer.one_memory
    finally:
        timer.close()


def test_the_command_writes_a_machine_that_others_read(capsys, tmp_path):
    file = str(tmp_path / "machine.yaml")
    assert main(["calibrate", "--devices", "3", "--noise", "1000", "-o", file]) == 0
    printed, before = capsys.readouterr()
    assert before.startswith(f"measuring 3 devices; to be written: {file}\n")
    assert "links HOST, GB/s" in printed and f"written: {file}" in printed
    assert main(["topo", file]) == 0
    printed = capsys.readouterr().out
    assert "speeds measured on 20" in printed and "side by side" not in printed
    assert main(["plan", file, "--bytes", "1MB"]) == 0
    assert "speeds measured on 20" in capsys.readouterr().out
    values = [[np.arange(5, dtype=np.float32) * tower] for tower in range(3)]
    for row in executed(values, cpus(3), strategy=Strategy(topology=file)):
        assert np.array_equal(row[0], np.arange(5) * 3)


@pytest.mark.parametrize(
    "devices, message",
    [
        (["/cpu:0"], "expected two devices or more"),
        (["/cpu:0", "/gpu:0"], "expected GPUs only, or CPUs only"),
        (["/cpu:0", "/cpu:0"], "expected each device once"),
    ],
)
def test_devices_that_cannot_be_calibrated_are_an_error(devices, message):
    with pytest.raises(HierAllreduceError, match=message):
        calibrate(devices)


@pytest.mark.parametrize(
    "option, message",
    [
        (["--noise", "-1"], "expected a number above 0"),
        (["--devices", "257"], "expected a whole number from 1 to 256"),
    ],
)
def test_an_invalid_option_is_refused_before_measuring(capsys, option, message):
    with pytest.raises(SystemExit):
        main(["calibrate", *option])
    assert message in capsys.readouterr().err
