"""The numbers that ranks send as they end a step, read by other threads than that of the steps."""

import threading
from types import SimpleNamespace

import pytest

from fpipe.errors import TransportError
from fpipe.handlers.distributed.activity import Activity, Markers
from fpipe.handlers.distributed.steps import Ends


class Pending:
    def is_completed(self):
        return False


def in_thread(call):
    """The error of a call in a thread of its own."""
    errors = []

    def run():
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    return errors[0]


def ends(thread):
    failures = SimpleNamespace(name="rank 0", check=lambda: None)
    activity = SimpleNamespace(thread=thread)
    steps = SimpleNamespace(limit=0.05, failures=failures, connections=SimpleNamespace(activity=activity))
    return Ends(steps, lambda: [[1]], [Pending()])


def test_a_reader_whose_limit_is_over_says_so():
    error = in_thread(ends(threading.current_thread()))
    assert isinstance(error, TransportError)
    assert "waited 0.05 s" in str(error)
    assert "compute_timeout" in str(error)
    assert "has failed" not in str(error)


def test_a_thread_that_got_the_number_of_the_steps_thread_is_another_one():
    """The system gives the number of a thread that has ended to one that begins."""
    earlier = threading.Thread(target=lambda: None)
    earlier.start()
    earlier.join()
    reads = ends(earlier)
    reads.wait = lambda: pytest.fail("waits as the thread of the steps")

    def read():
        earlier._ident = threading.get_ident()
        reads()

    assert "waited 0.05 s" in str(in_thread(read))


def test_the_thread_of_the_steps_is_kept_itself():
    activity = Activity(Markers(None))
    assert activity.thread is threading.current_thread()
    in_first = []
    in_first_thread = threading.Thread(target=lambda: (activity.enter(), in_first.append(threading.current_thread())))
    in_first_thread.start()
    in_first_thread.join()
    assert activity.thread is in_first[0] is in_first_thread
