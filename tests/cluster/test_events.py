"""What a host tells the program that launched it."""

import sys

from hier_allreduce.cluster import launch, publish, read_event


def test_an_event_is_read_from_the_line_that_the_launcher_passes_on(capsys):
    publish(step="loss 0.5", host=1, text="a\nb")
    (line,) = capsys.readouterr().out.splitlines()
    assert read_event(f"[host 1] {line}\n") == {"step": "loss 0.5", "host": 1, "text": "a\nb"}
    assert read_event("[host 1] loss 0.5\n") is None


def test_launched_hosts_publish_in_the_midst_of_their_output():
    program = "from hier_allreduce.cluster import publish; print('before'); publish(n=3); print('after')"
    lines = []
    assert launch(1, [sys.executable, "-c", program], lines.append) == 0
    assert [read_event(line) for line in lines] == [None, {"n": 3}, None]
    assert [line for line in lines if not read_event(line)] == ["[host 0] before\n", "[host 0] after\n"]
