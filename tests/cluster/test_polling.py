"""The generator behind every loop that waits for other hosts."""

import pytest

from hier_allreduce.cluster import polling


class Clock:
    """A clock that advances only when somebody sleeps."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.mark.parametrize(("seconds", "times"), [(0.0, [0]), (0.5, [0, 1]), (3.0, [0, 1, 2, 3]), (3.5, [0, 1, 2, 3, 4])])
def test_attempts_are_made_at_once_and_until_the_time_is_over(monkeypatch, seconds, times):
    clock = Clock()
    monkeypatch.setattr(polling, "time", clock)
    assert [clock.now - 100 for _ in polling.attempts(seconds, every=1.0)] == times
