"""The programs that a rank runs, behind its records, and what the verifier says of those of all ranks. No torch.

Each is its length, and its effects as a file of the Pipeline tab has them, all at time 0.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from fpipe.errors import ScheduleError
from fpipe.flight.format import BYTES, NUMBER
from fpipe.programs.interleaving import turns
from fpipe.programs.program import Program
from fpipe.tables import TABLE
from fpipe.tensorboard.files.columns import BadColumns, Columns, Header, decode, encode
from fpipe.tensorboard.files.plans import Plans

MOST_BYTES = 1 << 26  # of a rank's programs that are read


def packed(program: Program) -> bytes:
    """Return the bytes of a program.

    Raises:
        ScheduleError: it is larger than what is shown.
    """
    times, none = np.zeros(len(program)), np.full(len(program), -1, np.int32)
    columns = Columns(program.effects, times, times, (none, none), table=program.table)
    content = encode(Header("predicted", 0, program.rank, "", program.plan), columns)
    return NUMBER.pack(len(content)) + content


def read_program(file: Path, number: int, plans: Plans) -> Program | None:
    """Return one of the programs behind the records in a file; None if it is not there whole."""
    try:
        with file.open("rb") as stream:
            stream.seek(BYTES)
            room, content = MOST_BYTES, b""
            for _ in range(number + 1):
                (size,) = NUMBER.unpack(stream.read(NUMBER.size))
                room -= size
                if size <= 0 or room < 0:
                    return None
                content = stream.read(size)
        header, columns = decode(content, plans)
    except (OSError, struct.error, BadColumns):
        return None
    return Program(header.plan, header.rank, tuple(columns.effects))


def verdict(files: Iterable[Path], number: int) -> str | None:
    """Return why the programs of all ranks can't end, as `fpipe.verify` says it; "" if they can.

    Returns:
        None if a rank's program is not known.
    """
    plans, programs = Plans(), dict[int, Program]()
    for file in files:
        program = read_program(file, number, plans)
        if program is not None:
            programs.setdefault(program.rank, program)
    if not _are_known(programs):
        return None
    try:
        deque(turns(programs), 0)
    except ScheduleError as error:
        return str(error)
    return ""


def _are_known(programs: Mapping[int, Program]) -> bool:
    """Return whether there is a program of each rank, of one plan, whose effects are fpipe's own."""
    plans = [program.plan for program in programs.values()]
    if not plans or sorted(programs) != list(range(plans[0].ranks)) or any(plan != plans[0] for plan in plans):
        return False
    return all(type(effect) in TABLE.effects for program in programs.values() for effect in program)
