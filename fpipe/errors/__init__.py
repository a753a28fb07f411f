"""The errors, by cause: the schedule, the user's stage, its numbers, or a peer. No torch."""

import contextlib
from collections.abc import Iterator, Sequence


class ScheduleError(ValueError):
    """The schedule or its plan is wrong: an effect is missing, is out of order, or never finishes waiting.

    The message names ranks and effects, and the values that they wait for.
    """


class StageError(RuntimeError):
    """The user's code or data failed: a stage's function, its parameters, its inputs, or the loss.

    Args:
        message: the failure, and a way out.
        rank, stage, microbatch: where it failed, as far as that is known.

    An exception that the stage raised is the `__cause__`, with the frames of the user's code; FPIPE_TRACEBACK=full
    keeps all frames.
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

    def on(self, rank: int | None, stage: int | None = None, microbatch: int | None = None) -> "StageError":
        """Return the same error with its rank, and with its stage and its microbatch if it had none."""
        stage = stage if self.stage is None else self.stage
        microbatch = microbatch if self.microbatch is None else self.microbatch
        error = StageError(self.message, rank=rank, stage=stage, microbatch=microbatch)
        error.__cause__ = self.__cause__
        return error


class NonFiniteError(StageError, FloatingPointError):
    """The loss or the gradients of a step are not finite; raised on every rank, if the step was made to check it.

    Args:
        microbatch: the first whose loss is not finite, counted over all replicas; None if all are.
        stages: those whose gradients are not finite.
        is_late: it is of a call that has returned, with `post_validate=True`, and not of the one that raises it, whose
            batch was not used.
    """

    def __init__(
        self, message: str, *, microbatch: int | None = None, stages: Sequence[int] = (), is_late: bool = False
    ) -> None:
        super().__init__(message, microbatch=microbatch)
        self.stages, self.is_late = tuple(stages), is_late


@contextlib.contextmanager
def blaming(stage: int, microbatch: int) -> Iterator[None]:
    """Turn an exception of a stage's forward into a `StageError` with the stage and the microbatch."""
    try:
        yield
    except StageError as error:
        raise error.on(None, stage, microbatch) from error.__cause__
    except Exception as error:  # a stage is the user's, and may raise anything
        message = f"Forward raised {type(error).__name__}: {error}"
        raise StageError(message, stage=stage, microbatch=microbatch) from error


class TransportError(RuntimeError):
    """A peer failed or can't be reached; the message repeats the peer's reason if the peer left one.

    If the peer is still there, the next step may go on; if it is lost, its handler has ended.
    """
