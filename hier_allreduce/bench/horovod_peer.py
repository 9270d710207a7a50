"""Horovod on this machine, with a process for each device: what `bench hosts` sets beside its table.

Horovod reduces between processes, so that it cannot take part in `bench peers`, where one process has all towers. It
starts its own processes, and they run after the others. So its times are not of the same rounds.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Sequence, Tuple

import tensorflow as tf

from ..formatting import table
from ..graph import gpu_count, tf1
from .case import Case, consumed, variables
from .measuring import interleaved
from .models import GradientShape
from .results import quartiles

Gradients = Dict[str, Tuple[GradientShape, ...]]  # of each case


def horovod_text(gradients: Gradients, ours: Dict[str, Sequence[float]], processes: int, rounds: int) -> str:
    """Return Horovod's milliseconds for each case; or, where it is not installed or does not start, why.

    Args:
        gradients: the gradients of each device, for each case.
        ours: the seconds of our steps in each case.
        processes: how many to start: one for each device of all hosts.
        rounds: the number of timed steps.
    """
    try:
        import horovod

        of_all_processes = horovod.run(seconds_of_one_process, (gradients, rounds), np=processes)
    except Exception as error:  # another package's: whatever it raises, our own measurements are printed
        return f"horovod: cannot run: {' '.join(str(error).split())}"[:300]
    rows = [[f"Horovod, {processes} processes, after the others", "ms: median (quartiles)", "ours / it"]]
    for case, seconds in of_all_processes[0].items():
        low, median, high = quartiles(seconds)
        times = f"{median * 1e3:.1f} ({low * 1e3:.1f}–{high * 1e3:.1f})"
        rows.append([case, times, f"{quartiles(ours[case])[1] / median:.2f}"])
    return table(rows, all_right=True)


def seconds_of_one_process(gradients: Gradients, rounds: int) -> Dict[str, List[float]]:
    """Return the seconds of each step for each case, as one of Horovod's processes."""
    import horovod.tensorflow as hvd

    hvd.init()
    config = tf1.ConfigProto()
    config.gpu_options.visible_device_list = str(hvd.local_rank())  # as its documentation says: a GPU for each process
    device = "/gpu:0" if gpu_count() > hvd.local_rank() else "/cpu:0"
    seconds = {}
    for name, shapes in gradients.items():
        case = Case(shapes, (device,))
        with tf.Graph().as_default(), tf1.Session(config=config) as session:
            (grads,), fill = variables(case)
            step = consumed([[hvd.allreduce(grad, op=hvd.Sum) for grad in grads]], case)
            session.run(fill)
            steps: Dict[str, Callable[[], Any]] = {name: session.make_callable(step)}
            seconds.update(interleaved(steps, rounds, lambda stage: None))
    return seconds
