"""Gathers and scatters between the replicas of a pipeline: whole parameters out of shards, sums of gradients.

A sum is added in the order of the replicas, whatever order the messages take: every replica sends each other one its
part, which adds them. So the bits are those of one process. With `exact=False` the backend adds, in its own order, and
over a mesh of several dimensions on two levels: gradients are scattered over the last one, that of the shards, and each
part is then added over the others. So all but a part of the bytes stays where the links are fast.

Experts are spread over one dimension of the mesh. A process has its own, and computes their gradients from the tokens
of all processes along that dimension: they are added over the other dimensions alone.

Invariants:
- gathers, scatters, those of experts, and the second level have their own connections; on each, operations run in the
  order of posts;
- a post never waits, except for the handshake of the step;
- what is gathered belongs to the stage until its release; no buffer is used twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fpipe.autodiff.interface import Leaves
from fpipe.errors import StageError
from fpipe.handlers import contents
from fpipe.handlers.calls import Step
from fpipe.handlers.distributed.connections import Connections
from fpipe.handlers.distributed.grid import Grid
from fpipe.stages.precision import Precision
from fpipe.stages.pytree import describe, paths_of, short
from fpipe.stages.sharding import Sharding, is_dtensor, local, sharding_key

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

IN_PLACE = 1 << 18  # bytes from which a parameter is gathered straight into its place; smaller ones are packed


def lanes(
    mesh: DeviceMesh, grid: Grid, exact: bool, gathers: bool, experts: int | None = None
) -> dict[str, Sequence[int]]:
    """Return the processes with which this one gathers and scatters.

    Args:
        experts: the dimension of the mesh over which experts are spread.
    """
    shards = shard_dim(mesh, experts)
    same_copy = _along(mesh, grid, {shards})
    same_shard = _along(mesh, grid, {*range(mesh.ndim)} - {shards})
    same_experts = _along(mesh, grid, {*range(mesh.ndim)} - {experts})
    two_levels = not exact and len(same_copy) > 1 and len(same_shard) > 1
    own: dict[str, Sequence[int]] = {"scatter": same_copy if two_levels else grid.same_rank}
    if experts is not None and len(same_experts) > 1:
        own["experts"] = same_experts
    return own | ({"replicate": same_shard} if two_levels else {}) | ({"gather": same_copy} if gathers else {})


def shard_dim(mesh: DeviceMesh, experts: int | None) -> int | None:
    """Return the dimension over which parameters are sharded: the last one that is not that of the experts."""
    return max((dim for dim in range(mesh.ndim) if dim != experts), default=None)


def _along(mesh: DeviceMesh, grid: Grid, dims: Collection[int | None]) -> tuple[int, ...]:
    """Return the processes of this rank whose replicas differ from this one's along these dimensions of the mesh."""
    places = list(product(*map(range, mesh.shape)))
    own = places[grid.replica]
    fixed = [dim for dim in range(mesh.ndim) if dim not in dims]
    return tuple(
        process
        for process, place in zip(grid.same_rank, places, strict=True)
        if all(place[dim] == own[dim] for dim in fixed)
    )


@dataclass
class Shards:
    """A stage's sharded parameters in one step.

    Args:
        pieces: the leaves of the stage's params, in which DTensors are this replica's pieces.
        shardings: of each tensor among them.
    """

    pieces: Leaves
    shardings: dict[int, Sharding]
    arriving: list[Callable[[], None]] = field(default_factory=list)
    whole: Leaves = field(default_factory=list)


class ReplicaChannels:
    """Gathers and scatters of one program on one process.

    Args:
        mesh: of the replicas.
        exact: add in the order of the replicas.
        agree: waits for the handshake of the step.
        gathered: the stages that the program gathers.
        precision: the dtypes of gathered parameters and of sums.
        experts: the dimension of the mesh over which experts are spread.
    """

    def __init__(
        self,
        connections: Connections,
        mesh: DeviceMesh,
        exact: bool,
        gathered: frozenset[int],
        precision: Precision,
        experts: int | None,
        agree: Callable[[], None],
    ) -> None:
        self.connections, self.mesh, self.exact, self.agree, self.gathered = connections, mesh, exact, agree, gathered
        self.precision, self.experts = precision, experts
        self.others = frozenset(mesh.mesh.flatten().tolist()) - {dist.get_rank()}
        self.shards: dict[int, Shards] = {}
        self.reductions: list[list[_Reduction | _Single]] = []  # of each scatter that is not taken yet
        self.known: dict[int, tuple[list[tuple[object, ...]], dict[int, Sharding]]] = {}  # by stage, of the step before

    def begin(self, step: Step) -> None:
        """Take the params of a step.

        Raises:
            StageError: a stage's are sharded where the program gathers nothing, or the other way round.
        """
        self.shards, step.others = {}, self.others
        for stage, prepared in step.prepared.items():
            tensors = {i: x for i, x in enumerate(prepared.leaves) if isinstance(x, Tensor)}
            names = [f"params{short(path)}" for path in paths_of(prepared.spec)]
            shardings = self._shardings(stage, tensors, names)
            sharded = [i for i, sharding in shardings.items() if sharding.dim is not None]
            if sharded and stage not in self.gathered:
                raise self._wrong(
                    stage,
                    f"its parameters are sharded over the replicas, as {names[sharded[0]]} is: pass resident= to "
                    "value_and_grad and evaluate. If they are experts, of which each process computes its own, make "
                    "the handler with experts='ep' instead",
                )
            plain = [i for i, x in tensors.items() if not is_dtensor(x)]
            if stage in self.gathered and plain:
                raise self._wrong(
                    stage,
                    f"its parameters must be sharded, for resident= was passed, and {names[plain[0]]}, "
                    f"{describe(tensors[plain[0]])}, is not: shard all by interop.fsdp(params, mesh), or leave "
                    "resident out",
                )
            pieces = [self.precision.cast(local(leaf)) for leaf in prepared.leaves]
            if self.precision.compute is not None:
                shardings = {i: replace(sharding, dtype=pieces[i].dtype) for i, sharding in shardings.items()}
            if self.connections.grid.batches or any(sharding.is_expert for sharding in shardings.values()):
                step.joint.add(stage)
            self.shards[stage] = Shards(pieces, shardings)
            prepared.leaves[:] = self.shards[stage].pieces
            prepared.placed.update(
                {i: sharding.placed for i, sharding in shardings.items() if sharding.placed is not None}
            )

    def clear(self) -> None:
        """Drop what refers to a step's params and gradients."""
        self.shards = {}
        for reductions in self.reductions:
            reductions.clear()

    def _shardings(self, stage: int, tensors: Mapping[int, Tensor], names: Sequence[str]) -> dict[int, Sharding]:
        """Return the shardings of a stage's params: those of the step before, where they are placed alike."""
        places = [sharding_key(x) for x in tensors.values()]
        if stage not in self.known or self.known[stage][0] != places:
            self.known[stage] = places, {i: self._sharding(stage, x, names[i]) for i, x in tensors.items()}
        return self.known[stage][1]

    def _sharding(self, stage: int, leaf: Tensor, name: str) -> Sharding:
        try:
            sharding = Sharding.of(leaf, self.mesh, self.experts)
        except ValueError as error:
            raise self._wrong(stage, f"{name}: {error}") from error
        if is_dtensor(leaf) and sharding.mesh_dim not in (None, shard_dim(self.mesh, self.experts)):
            last = "last one" if self.experts is None else "last one beside that of the experts"
            raise self._wrong(
                stage,
                f"{name}, {describe(leaf)}, is cut over dimension {sharding.mesh_dim} of the replicas' mesh, "
                f"{_placed(leaf)}, and shards are gathered over its {last}: shard it by interop.fsdp(params, mesh), "
                "or pass the mesh's dimensions to the handler in the other order",
            )
        return sharding

    def _wrong(self, stage: int, message: str) -> StageError:
        return StageError(message, rank=self.connections.grid.rank, stage=stage)

    def digest(self, step: Step, has_values: bool) -> dict[str, str]:
        """Return descriptions of the params, by name: they must be equal on this rank in all replicas.

        Args:
            has_values: with digests of the values of those that every replica has whole.
        """
        rows, values = dict[str, str](), dict[str, str]()
        for stage, prepared in step.prepared.items():
            names = [f"params[{stage}]{short(path)}" for path in paths_of(prepared.spec)]
            for i, sharding in self.shards[stage].shardings.items():
                dtype = str(sharding.dtype).removeprefix("torch.")
                pieces = "" if sharding.dim is None else f" in {sharding.shards} shards along dimension {sharding.dim}"
                experts = ", of each process's own experts" if sharding.is_expert else ""
                frozen = "" if i in prepared.trained else ", frozen"
                rows[names[i]] = f"{dtype}{[*sharding.shape]}{pieces}{experts}{frozen}"
                if has_values and sharding.dim is None and not sharding.is_expert:
                    digest = contents.digest(self.shards[stage].pieces[i])
                    values[f"the digest of the values of {names[i]}"] = digest
        return rows | values

    # Parameters

    def gather(self, stage: int, rank: int) -> tuple[Callable[[Step], Leaves], Callable[[Step], Leaves]]:
        purpose = f"gathering the parameters of stage {stage}"

        def post(step: Step) -> Leaves:
            self.agree()
            shards = self.shards[stage]
            shards.whole = list(shards.pieces)
            buffers: Leaves = []
            for arrive, buffer in self._gather(shards, purpose):
                shards.arriving.append(arrive)
                buffers.append(buffer)
            return buffers

        def take(step: Step) -> Leaves:
            shards, prepared = self.shards[stage], step.prepared[stage]
            for arrive in shards.arriving:
                arrive()
            prepared.replace(shards.whole)
            gathered = [x for x, piece in zip(shards.whole, shards.pieces, strict=True) if x is not piece]
            shards.arriving, shards.whole = [], []
            return gathered

        return post, take

    def release(self, stage: int, step: Step) -> None:
        step.prepared[stage].replace(self.shards[stage].pieces)

    def _gather(self, shards: Shards, purpose: str) -> Iterator[tuple[Callable[[], None], Tensor]]:
        """Post the gathering of a stage's leaves; yield functions that wait, and put whole leaves into their place.

        Each comes with the buffer into which its leaves are gathered.
        """
        packed = defaultdict[Any, list[int]](list)
        for i, sharding in shards.shardings.items():
            if sharding.dim is None:
                continue
            if prod(sharding.shape) * sharding.dtype.itemsize < IN_PLACE:
                packed[sharding.dtype, shards.pieces[i].device].append(i)
            else:
                yield self._gather_one(shards, i, sharding, purpose)
        for numbers in packed.values():
            yield self._gather_packed(shards, numbers, purpose)

    def _gather_one(
        self, shards: Shards, i: int, sharding: Sharding, purpose: str
    ) -> tuple[Callable[[], None], Tensor]:
        piece = sharding.padded(shards.pieces[i])
        whole = piece.new_empty((sharding.shards * piece.shape[0], *piece.shape[1:]))
        works = self.connections.all_gather("gather", whole, piece, purpose)

        def arrive() -> None:
            self.connections.wait_on_lane("gather", works, purpose, piece)
            shards.whole[i] = sharding.joined(whole)

        return arrive, whole

    def _gather_packed(self, shards: Shards, numbers: list[int], purpose: str) -> tuple[Callable[[], None], Tensor]:
        shardings = [shards.shardings[i] for i in numbers]
        pieces = [sharding.padded(shards.pieces[i]) for i, sharding in zip(numbers, shardings, strict=True)]
        sizes = [piece.numel() for piece in pieces]
        own = torch.cat([piece.reshape(-1) for piece in pieces])
        every = own.new_empty(shardings[0].shards, own.numel())
        works = self.connections.all_gather("gather", every, own, purpose)

        def arrive() -> None:
            self.connections.wait_on_lane("gather", works, purpose, own)
            for i, sharding, piece, part in zip(
                numbers, shardings, pieces, every.split_with_sizes(sizes, 1), strict=True
            ):
                whole = part.reshape(sharding.shards * piece.shape[0], *piece.shape[1:])
                shards.whole[i] = sharding.joined(whole)

        return arrive, every

    # Gradients

    def scatter(self, stage: int, rank: int) -> tuple[Callable[[Step], None], Callable[[Step], Callable[[], Leaves]]]:
        purpose = f"adding the gradients of stage {stage} over the replicas"
        reductions: list[_Reduction | _Single] = []
        self.reductions.append(reductions)

        def post(step: Step) -> None:
            self.agree()
            prepared, shardings = step.prepared[stage], self.shards[stage].shardings
            terms, of_trained = step.sums.pop(stage).read(), [shardings[i] for i in prepared.trained]
            pieces = self.shards[stage].pieces
            same = defaultdict[Any, list[int]](list)
            for k, sharding in enumerate(of_trained):
                if terms[k] is None:
                    terms[k] = self.precision.term(_filled(pieces[prepared.trained[k]], sharding))
                lane = "experts" if sharding.is_expert else "scatter"
                alone = k if terms[k].nbytes >= IN_PLACE else None
                same[lane, alone, terms[k].dtype, terms[k].device].append(k)
            reductions[:] = [
                _Reduction(self, lane, numbers, of_trained, terms, purpose)
                if lane in self.connections.lanes
                else _Single(numbers, of_trained, terms)
                for (lane, *_), numbers in same.items()
            ]

        def take(step: Step) -> Callable[[], Leaves]:
            for reduction in reductions:
                reduction.add()
            for reduction in reductions:
                reduction.share()

            def leaves() -> Leaves:
                result: Leaves = [None] * len(step.prepared[stage].trained)
                for reduction in reductions:
                    reduction.put(result)
                reductions.clear()
                step.scattered[stage] = lambda: result
                return result

            return leaves

        return post, take


class _Single:
    """The sum of some gradients of a stage that no other replica has: those of experts that are on one process each."""

    def __init__(self, numbers: Sequence[int], shardings: Sequence[Sharding], terms: Leaves) -> None:
        self.sums = {k: shardings[k].laid_out(terms[k]) for k in numbers}

    def add(self) -> None:
        """There is nothing to wait for."""

    def share(self) -> None:
        """There is nothing to post."""

    def put(self, result: Leaves) -> None:
        for k, total in self.sums.items():
            result[k] = total


class _Reduction:
    """The sum of some gradients of a stage over the replicas; they have one dtype and one device.

    Every process of a lane gets its shard of the sharded ones, and an equal part of the others, which is then gathered.
    """

    def __init__(
        self,
        channels: ReplicaChannels,
        lane: str,
        numbers: list[int],
        shardings: Sequence[Sharding],
        terms: Leaves,
        purpose: str,
    ) -> None:
        self.connections, self.lane, self.purpose, self.exact = channels.connections, lane, purpose, channels.exact
        self.members = self.connections.lanes[lane]
        self.two_levels = lane == "scatter" and "replicate" in self.connections.lanes
        self.sharded = [(k, shardings[k]) for k in numbers if shardings[k].dim is not None]
        self.others = [(k, shardings[k]) for k in numbers if shardings[k].dim is None]
        count = sum(terms[k].numel() for k, _ in self.others)
        self.part = -(-count // len(self.members))  # of the others, in the care of each process
        whole = terms[numbers[0]]
        if len(numbers) == 1 and _is_cut_in_place(whole, shardings[numbers[0]], len(self.members)):
            self.sent, self.own = whole.view(-1), whole.numel() // len(self.members)
        else:
            self.sent, self.own = self._packed(channels, shardings, terms)
        works, received = self.connections.exchange(lane, self.sent, self.exact, purpose)
        self.works: list[dist.Work] = works
        self.received: Tensor | None = received

    def _packed(self, channels: ReplicaChannels, shardings: Sequence[Sharding], terms: Leaves) -> tuple[Tensor, int]:
        """Return the parts for all processes, one after another and equally long, and the length of this one's own."""
        rest = [terms[k].reshape(-1) for k, _ in self.others]
        chunks = _cut(torch.cat(rest), self.part, len(self.members)) if rest else [[]] * len(self.members)
        shard_of = [_shard_of(channels.mesh, sharding.mesh_dim) for _, sharding in self.sharded]
        pieces = [sharding.pieces(terms[k]) for k, sharding in self.sharded]
        grid = channels.connections.grid
        rows = [
            [*(own[shards[r // grid.ranks]].reshape(-1) for own, shards in zip(pieces, shard_of, strict=True)), *chunk]
            for r, chunk in zip(self.members, chunks, strict=True)
        ]
        sizes = [sum(x.numel() for x in row) for row in rows]
        like = next(part for row in rows for part in row)
        fills = [like.new_zeros(max(sizes) - size) for size in sizes]
        packed = torch.cat([part for row, fill in zip(rows, fills, strict=True) for part in (*row, fill)])
        return packed, sizes[self.members.index(grid.number)]

    def add(self) -> None:
        """Wait for the others' parts, and add them; post the sum of the second level."""
        assert self.received is not None
        self.connections.wait_on_lane(self.lane, self.works, self.purpose)
        if self.exact:
            first, *others = self.received.view(len(self.members), -1)
            self.sum = first + others[0]
            for other in others[1:]:
                self.sum += other
        else:
            self.sum = self.received
        self.received = None
        del self.sent
        if self.two_levels:
            self.works = self.connections.all_reduce("replicate", self.sum, self.purpose)

    def share(self) -> None:
        """Wait for the second level; post the gathering of the sums that every replica needs."""
        if self.two_levels:
            self.connections.wait_on_lane("replicate", self.works, self.purpose)
        if self.others:
            part = self.sum[self.own - self.part : self.own].contiguous()
            self.rest = part.new_empty(len(self.members) * self.part)
            self.works = self.connections.all_gather(self.lane, self.rest, part, self.purpose)

    def put(self, result: Leaves) -> None:
        """Put the sums into their places, in the memory order of the parameters, as autograd accumulates gradients."""
        at = 0
        for k, sharding in self.sharded:
            shape = sharding.piece_shape
            result[k] = sharding.laid_out(self.sum[at : at + prod(shape)].view(shape))
            at += prod(shape)
        if self.others:
            self.connections.wait_on_lane(self.lane, self.works, self.purpose)
            at = 0
            for k, sharding in self.others:
                shape = sharding.shape
                result[k] = sharding.laid_out(self.rest[at : at + prod(shape)].view(shape))
                at += prod(shape)


def _placed(leaf: DTensor) -> str:
    return f"{leaf.placements} over {leaf.device_mesh}"


def _is_cut_in_place(whole: Tensor, sharding: Sharding, count: int) -> bool:
    """Return whether a gradient's memory is the parts for so many processes, one after another and equally long."""
    if not whole.is_contiguous():
        return False
    if sharding.dim is None:
        return whole.numel() % count == 0
    return sharding.dim == 0 and sharding.shards == count and whole.shape[0] % count == 0


def _cut(whole: Tensor, part: int, count: int) -> list[list[Tensor]]:
    """Return equal parts of a flat tensor, each as a list of tensors to be joined; the last ones are padded."""
    parts = [whole[at * part : (at + 1) * part] for at in range(count)]
    return [[x, x.new_zeros(part - x.numel())] for x in parts]


def _filled(piece: Tensor, sharding: Sharding) -> Tensor:
    """Return the gradient that stands for none: it changes no bit of a sum."""
    return torch.full(sharding.shape, -0.0, dtype=sharding.dtype, device=piece.device)


def _shard_of(mesh: DeviceMesh, mesh_dim: int | None) -> list[int]:
    """Return the number of each replica's shard."""
    assert mesh_dim is not None
    inner = prod(mesh.shape[mesh_dim + 1 :])
    return [replica // inner % mesh.shape[mesh_dim] for replica in range(mesh.size())]
