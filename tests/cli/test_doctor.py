"""``doctor``: what it asks TensorFlow. ``test_cli.py``, which needs no TensorFlow, has what it makes of the answers."""

import json

from helpers.forks import run_forked

from hier_allreduce.cli import doctor


def test_doctor_reads_the_answer_of_another_process(tmp_path):
    done = run_forked(doctor._PROBE, folder=tmp_path)
    assert done.status == 0, done.err
    facts = json.loads(done.out.splitlines()[-1])
    assert facts["version"] and facts["gpus"] == []
