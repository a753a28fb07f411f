"""Whose fault it was: the program's, the user's stage, or a peer's. No torch."""

from collections.abc import Iterator
from contextlib import contextmanager


class ScheduleError(ValueError):
    """The schedule or its plan is wrong: an effect missing, out of order, or waiting for ever.

    The message names ranks and effects, and what each of them waits for.
    """


class StageError(RuntimeError):
    """What the user gave failed: a stage's function, its parameters, its inputs, or the loss.

    Args:
        message: what went wrong, and a way out.
        rank, stage, microbatch: where, as far as it is known.

    An exception that the stage raised is the `__cause__`, with its own traceback.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        stage: int | None = None,
        microbatch: int | None = None,
    ) -> None:
        place = {"rank": rank, "stage": stage, "microbatch": microbatch}
        where = ", ".join(f"{word} {at}" for word, at in place.items() if at is not None)
        super().__init__(f"{where}: {message}" if where else message)
        self.message, self.rank, self.stage, self.microbatch = message, rank, stage, microbatch

    def on(self, rank: int | None, microbatch: int | None = None) -> "StageError":
        """The same error with the rank, and the microbatch, that it happened on."""
        microbatch = microbatch if self.microbatch is None else self.microbatch
        found = StageError(self.message, rank=rank, stage=self.stage, microbatch=microbatch)
        found.__cause__ = self.__cause__
        return found


@contextmanager
def blaming(stage: int, microbatch: int) -> Iterator[None]:
    """Turn what a stage's forward raises into a `StageError` that says where."""
    try:
        yield
    except StageError:
        raise
    except Exception as error:
        message = f"Forward raised {type(error).__name__}: {error}"
        raise StageError(message, stage=stage, microbatch=microbatch) from error


class TransportError(RuntimeError):
    """A peer failed or can't be reached; the message repeats the peer's own reason where it left one."""
