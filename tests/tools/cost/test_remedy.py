"""Which remedy is named: that of the longest wait, and none for a short one."""

import pytest

from hier_allreduce_tools.cost.gaps import COPIES, PROCESSOR, Segment
from hier_allreduce_tools.cost.pieces import ChunkTimes, Link, TowerTimes
from hier_allreduce_tools.cost.remedy import remedy_for
from hier_allreduce_tools.cost.traced import PASS, SUM, UPDATE, TowerCopy

GPU = "/job:localhost/replica:0/task:0/device:GPU:"


def towers(end=100.0):
    return [TowerTimes(f"{GPU}{k}", 80.0, end - k, {}, {}, {}, {}, 7) for k in range(3)]


def links(slow=1.0):
    pairs = [(src, dst) for src in range(3) for dst in range(3) if src != dst]
    return [Link(*pair, 2, 10**6, 1.0 if pair != (1, 2) else 1 / slow) for pair in pairs]


def chunks(*roots):
    return [ChunkTimes(f"v{n}", root, 2, 1.0, 2.0, 3.0, 4.0, 5.0) for n, root in enumerate(roots)]


def copies(src, dst, begin, end):
    return [TowerCopy(src, dst, "sum", ("update",), begin, end, 10**6)]


def waits(reason, kind, ms, begin=80.0):
    return [Segment(begin, begin + ms, kind, reason)]


def remedy(of_chunks=(), of_links=(), of_copies=(), segments=()):
    times = towers()
    for segment in segments:
        if segment.reason == PROCESSOR and segment.begin < times[0].pass_end:
            times[0].gaps[PROCESSOR] = segment.ms
        elif segment.reason == PROCESSOR:
            times[0].processor_after[segment.kind] = segment.ms
    return remedy_for(times, 0, segments, of_chunks, of_links, of_copies)


@pytest.mark.parametrize(
    ("kind", "begin", "words"),
    [
        (SUM, 80.0, "The last chunks waited 4 ms for the processor: larger chunks help"),
        (UPDATE, 80.0, "The updates waited 4 ms for the processor, which launches 7 of them"),
        (PASS, 10.0, "The pass waited 4 ms for the processor, which launches its kernels too late"),
    ],
)
def test_who_waited_for_the_processor_is_named(kind, begin, words):
    assert remedy(segments=waits(PROCESSOR, kind, 4.0, begin)).startswith(words)


def test_a_wait_of_less_than_3_percent_has_no_remedy():
    assert remedy(segments=waits(PROCESSOR, SUM, 2.9)) == ""
    assert remedy() == ""


def test_the_longest_wait_decides():
    both = [*waits(PROCESSOR, SUM, 4.0), *waits(COPIES, SUM, 8.0, 84.0)]
    slow = remedy(chunks(0, 1), links(0.1), copies(1, 2, 80.0, 100.0), both)
    assert slow.startswith("The copies from GPU 1 to GPU 2 reach 0.1 GB/s, others 1 GB/s")
    short = remedy(chunks(0, 1), links(0.1), copies(1, 2, 90.0, 100.0), both)
    assert short.startswith("The last chunks waited 4 ms for the processor")


def test_a_slow_link_that_nobody_waited_for_is_not_named():
    waited = waits(COPIES, SUM, 8.0)
    assert remedy(chunks(0, 1), links(0.1), copies(1, 2, 10.0, 20.0), waited) == ""
    assert remedy(chunks(0, 1), links(0.9), copies(1, 2, 80.0, 88.0), waited) == ""
    unknown = [link._replace(bytes=0) for link in links()]
    assert remedy(chunks(0, 1), unknown, copies(0, 1, 80.0, 88.0), waited) == ""


def test_one_root_is_named_if_its_copies_were_waited_for():
    waited = waits(COPIES, UPDATE, 8.0)
    named = remedy(chunks(2, 2), links(), copies(2, 0, 70.0, 100.0), waited)
    assert named.startswith("GPU 2 receives all gradients, and sends all sums")
    assert remedy(chunks(2, 1), links(), copies(2, 0, 70.0, 100.0), waited) == ""
    assert remedy(chunks(2, 2), links(), copies(0, 1, 70.0, 100.0), waited) == ""


def test_the_threads_of_cpu_devices_are_no_processor_that_could_be_late():
    late = [tower._replace(processor_after={SUM: 50.0}) for tower in towers()]
    assert remedy_for(late, 0, (), (), (), ()) != ""
    on_cpu = [tower._replace(device="/job:localhost/device:CPU:0") for tower in late]
    assert remedy_for(on_cpu, 0, (), (), (), ()) == ""
