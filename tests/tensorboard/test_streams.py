"""Long answers, one at a time."""

import pytest
from werkzeug.exceptions import Conflict

from fpipe.tensorboard.server import streams
from fpipe.tensorboard.server.streams import Turns


def test_a_stream_yields_its_pieces_and_then_the_next_begins():
    turns = Turns()
    for _ in range(2):
        stream = turns.begin(iter([b"a", b"b"]))
        assert list(stream) == [b"a", b"b"]
        stream.close()


def test_one_runs_at_a_time():
    turns = Turns()
    stream = turns.begin(iter([b"a", b"b"]))
    assert next(stream) == b"a"
    with pytest.raises(Conflict, match="another export is being made: wait until it has ended, or cancel it"):
        turns.begin(iter([]))
    stream.close()  # its client is gone
    assert list(turns.begin(iter([b"c"]))) == [b"c"]


def test_one_that_nobody_takes_gives_way_and_does_not_seem_whole(monkeypatch):
    turns = Turns()
    stalled = turns.begin(iter([b"a", b"b"]))
    next(stalled)
    monkeypatch.setattr(streams, "STALLED", 0.0)
    assert list(turns.begin(iter([b"c"]))) == [b"c"]
    with pytest.raises(ConnectionAbortedError):
        next(stalled)
