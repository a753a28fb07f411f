"""No torch here: the process that hands tests to workers needs none."""

import atexit
import gc
import logging
import os
import shutil
import sys
import tempfile
from collections import Counter

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"  # torch asks for names of addresses, and some servers never answer
os.environ["FPIPE_FLIGHTS"] = FLIGHTS = tempfile.mkdtemp(prefix="fpipe-tests-")

import hypothesis
import pytest

from tests.support.combinations import PAIRS, examples
from tests.support.forked import fork_server
from tests.support.pool import Gpus, Pool, kept

collect_ignore = ["support"]  # has no doctests, and imports much

hypothesis.settings.register_profile("shared machine", deadline=None, max_examples=examples(100))
hypothesis.settings.load_profile("shared machine")
OWNER = os.getpid()


@atexit.register
def remove_flights():
    """At the end of this process, whose children may be forked and write on."""
    if os.getpid() == OWNER:
        shutil.rmtree(FLIGHTS, ignore_errors=True)


def pytest_configure(config):
    """A test that means graphs is not to run by eager autograd unnoticed."""
    config.addinivalue_line("filterwarnings", "error:stage .* can't be traced:UserWarning")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Leave out thorough tests, and of those marked with `one_in` all other rows, until FPIPE_TESTS asks for them."""
    if PAIRS:
        return
    rows, kept, left_out = Counter(), [], []
    for item in items:
        test, mark = (item.parent, getattr(item, "originalname", item.name)), item.get_closest_marker("one_in")
        is_between = mark is not None and rows[test] % mark.args[0] > 0
        rows[test] += 1
        (left_out if is_between or item.get_closest_marker("thorough") else kept).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def pytest_collection_finish():
    """Keep the garbage collector out of imported modules, and run it less often while stages are traced.

    Torch records its traces if a logger has a handler, and pytest adds a handler to each logger that doesn't propagate.
    """
    logging.getLogger("torch.__trace").propagate = True
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
    torch = sys.modules.get("torch")
    if torch and not torch.cuda.device_count():  # what has used CUDA can't be forked
        fork_server()


@pytest.fixture(scope="session")
def pools():
    """`pools(n)`: n processes joined by gloo, made on first use and kept in `pools.made`."""
    with kept() as get:
        yield get


@pytest.fixture(scope="session")
def gpu_pools():
    """`gpu_pools(n, job)`: n processes on the GPUs there are; the job's process group is of gloo or nccl."""
    made = {}

    def get(size, job="gloo"):
        if (size, job) not in made:
            made[size, job] = Pool(size, Gpus(job))
        return made[size, job]

    yield get
    for pool in made.values():
        pool.close()


@pytest.fixture
def fresh_pool():
    """`fresh_pool(n)`: processes of this test alone, to be killed or broken."""
    made = []

    def get(size):
        made.append(Pool(size))
        return made[-1]

    yield get
    for pool in made:
        pool.close()
