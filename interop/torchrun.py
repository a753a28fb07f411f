"""torchrun whose workers are forked from a process that has imported torch and fpipe: a restart imports them no more.

    python -m fpipe.interop.torchrun --standalone --nproc-per-node 4 --max-restarts 100 train.py --steps 1000

The arguments are torchrun's, and `--preload MODULE`, any number of times: a module to import as well, such as one that
splits the model. On each host, one process imports these modules, once. They must start no thread, and use no device
but the CPU, because that process is forked for each worker. A worker runs the script from its beginning, as under
torchrun. Changes of the modules' files have no effect before the job is started anew.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import sys
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.run import get_args_parser, run

from fpipe.interop.preloading import announce

PRELOADED = (
    "torch._dynamo",
    "torch._inductor.fx_passes.dedupe_symint_uses",
    "torch.distributed.checkpoint",
    "fpipe.autodiff.functions",
    "fpipe.handlers.distributed.handler",
    "fpipe.interop.checkpoints.run",
    "fpipe.interop.modules.functions",
    "fpipe.interop.optim",
    "fpipe.training.verbs",
    "torch.distributed.run",
)
"""The modules that a worker imports until its first step is over."""


@record
def main(arguments: Sequence[str] | None = None) -> None:
    """Start a job as torchrun does.

    Args:
        arguments: by default those of the command line.
    """
    parser = get_args_parser()
    parser.prog = "python -m fpipe.interop.torchrun"
    parser.add_argument("--preload", action="append", default=[], metavar="MODULE", help="A module to import once.")
    parsed = parser.parse_args(arguments)
    for option in ("module", "no_python"):
        if getattr(parsed, option):
            parser.error(f"--{option.replace('_', '-')} starts a new interpreter: pass the path of a script")
    script = Path(parsed.training_script).resolve()
    sys.path.insert(0, str(script.parent))  # as of a script that Python starts; workers get this path
    for module in parsed.preload:
        if not _is_module(module):
            parser.error(f"--preload {module}: there is no such module on {sys.path}")
    parsed.training_script, parsed.training_script_args = __file__, [str(script), *parsed.training_script_args]
    parsed.run_path, parsed.start_method = True, "forkserver"
    os.environ.setdefault("PYTHONUNBUFFERED", "1")  # as torchrun starts interpreters
    announce(sys.path, [*PRELOADED, *parsed.preload])
    multiprocessing.set_forkserver_preload([announce.__module__])
    run(parsed)  # type: ignore[no-untyped-call]


def _is_module(name: str) -> bool:
    """Return whether there is a module of a name. Imports the packages that it is in."""
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # of a package that is none, or of no name
        return False


def run_script(path: str, *arguments: str) -> None:
    """Run a script in this process, a worker's, as an interpreter would: to the end of its threads, and of its exit."""
    sys.argv = [path, *arguments]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as left:
        if left.code not in (None, 0):  # else the worker returns: torchrun waits for that
            raise
    except BaseException as error:
        sys.last_value = error
        raise
    finally:  # multiprocessing ends its processes without the second, and does the first after it
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


if __name__ == "__main__":
    if multiprocessing.parent_process() is None:
        main()
    else:
        run_script(*sys.argv[1:])
