"""A stage and the gradients of its outputs, traced once into one graph of operations.

Invariants:
- nothing is run for real, and nothing that a caller could observe changes: tensors are fakes of their specs,
  and the generators are put back;
- forward and backward are told apart by when they were traced, which a rematerialised forward doesn't upset;
- a draw is known by the generator's seed: a forward that is redone inside the stage restores the seed of its
  first run, so that each of its draws finds the one it repeats.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

from fpipe import policies
from fpipe.autodiff.graph.guards import symbolic
from fpipe.autodiff.graph.signature import Call, Leaf, Spec, Static, Untraceable
from fpipe.stages.pytree import flatten, viewed
from fpipe.stages.stage import Stage

Cotangent = tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None
"""Shape, strides and dtype of an output leaf's cotangent; None where there is none."""
AS_OUTPUT: Cotangent = ((-1,), (-1,), torch.float32)
"""Stands for a cotangent laid out as its output."""
LOG = logging.getLogger("torch._subclasses.fake_tensor")


@dataclass(frozen=True)
class Joint:
    """A traced stage. Lists have a node where there is a tensor, else what stands there.

    Args:
        root: holds what `get_attr` nodes name.
        params, inputs: placeholders, by the call's leaves.
        cotangents: by output leaf, None where it has none.
        outputs, state: leaves of what the stage gives.
        weights, gradients: of the trained params, and of all inputs of the call.
        wanted: which output leaves want a gradient.
        data: those of the inputs that are the microbatch's.
        fakes: the tensors among the inputs, as they were traced.
    """

    graph: fx.Graph
    root: torch.nn.Module
    params: list[fx.Node | None]
    inputs: list[fx.Node | None]
    cotangents: list[fx.Node | None]
    outputs: list[Any]
    output_spec: optree.PyTreeSpec
    wanted: list[bool]
    state: list[Any]
    state_spec: optree.PyTreeSpec
    weights: list[fx.Node | None]
    gradients: list[fx.Node | None]
    data: list[fx.Node | None]
    fakes: list[Tensor]


@dataclass
class _Recorded:
    """What the traced function leaves behind besides its graph."""

    structure: dict[str, Any] = field(default_factory=dict)
    cotangents: dict[int, str] = field(default_factory=dict)
    forward: frozenset[str] = frozenset()


def trace(stage: Stage, call: Call, cotangents: Sequence[Cotangent] | None, loss: bool, dynamic: bool = False) -> Joint:
    """Trace a stage for a signature.

    Args:
        cotangents: of each output leaf; by default each that can have one does, laid out as the leaf itself.
        loss: only leaf 0 has one by default.
        dynamic: make the sizes of all inputs symbols.

    Raises:
        Exception: whatever the stage raises on tensors without values.
    """
    env = ShapeEnv(duck_shape=False) if dynamic else None
    found, marker = _Recorded(), _Marker(env)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=env)
    with _undisturbed(), mode, marker.naming():
        specs = [x for x in call.params.leaves if isinstance(x, Spec)]
        params = [_viewed_as(_fake(x), x) for x in specs]
        inputs = [x for x in call.inputs if isinstance(x, Spec)]
        read = [symbolic(x, f"x{i}", mode) if dynamic else _fake(x) for i, x in enumerate(inputs)]
        fakes = [*params, *(_viewed_as(x, spec) for x, spec in zip(read, inputs, strict=True))]
        run = _joint(stage, call, cotangents, loss, found, marker)
        module = make_fx(run, _allow_non_fake_inputs=True)(fakes)
    return _assemble(module, call, found, marker, read)


def _joint(
    stage: Stage, call: Call, cotangents: Sequence[Cotangent] | None, loss: bool, found: _Recorded, marker: _Marker
) -> Callable[[list[Tensor]], list[Any]]:
    def run(fakes: list[Tensor]) -> list[Any]:
        rest = iter(fakes)
        params = _own(call.params.leaves, rest, set(call.trained))
        state = _own(call.state.leaves, rest)
        sources = [
            _own(tree.leaves, rest, {i for i, x in enumerate(tree.leaves) if call.keep and _wants(x)})
            for tree in call.sources
        ]
        data = _own(call.data.leaves, rest)
        trees = [tree.spec.unflatten(leaves) for tree, leaves in zip(call.sources, sources, strict=True)]
        with marker, torch.set_grad_enabled(call.keep), _casting_once():
            given = call.data.spec.unflatten(data)
            result, new = stage(
                call.params.spec.unflatten(params),
                call.state.spec.unflatten(state),
                stage.arguments(dict(zip(stage.sources, trees, strict=True)), given),
            )
            outputs, new = flatten(viewed(result)), flatten(viewed(new))
            graph = marker.graph
            found.forward = frozenset(node.name for node in graph.nodes)
            marker.turn()
            inputs = [*state, *itertools.chain.from_iterable(sources), *data]
            weights, gradients = _gradients(
                outputs.leaves, [params[i] for i in call.trained], inputs, call, cotangents, loss, found, graph
            )
        if (env := marker.symbols) is not None:
            _check_sizes([*outputs.leaves, *new.leaves], env)
        lists = {"outputs": outputs.leaves, "state": new.leaves, "weights": weights, "gradients": gradients}
        wanted = [call.keep and isinstance(x, Tensor) and x.requires_grad for x in outputs.leaves]
        values: list[Any] = []
        for name, leaves in lists.items():
            found.structure[name] = [_Slot(len(values) + k) if _traced(x) else x for k, x in enumerate(leaves)]
            values += [x if _traced(x) else None for x in leaves]
        found.structure |= {"output_spec": outputs.spec, "state_spec": new.spec, "wanted": wanted}
        return values

    return run


@dataclass(frozen=True)
class _Slot:
    """Where in the graph's output a leaf is."""

    at: int


def _check_sizes(leaves: list[Any], env: ShapeEnv) -> None:
    """Refuse plain values that a size went into: they would be those of the sizes traced."""
    names = [str(symbol) for symbol in env.var_to_range]
    for x in leaves:
        if not _traced(x) and (isinstance(x, torch.Size) or any(name in str(x) for name in names)):
            raise Untraceable(f"it puts out {type(x).__name__} {x}, which depends on sizes")


def _traced(x: Any) -> bool:
    return isinstance(x, Tensor | torch.SymInt | torch.SymFloat | torch.SymBool)


def _wants(x: Leaf) -> bool:
    return isinstance(x, Spec) and x.wanted


def _own(leaves: Sequence[Leaf], fakes: Iterator[Tensor], wanted: set[int] | frozenset[int] = frozenset()) -> list[Any]:
    """Leaves of our own to differentiate by."""
    own: list[Any] = []
    for i, x in enumerate(leaves):
        if isinstance(x, Static):
            own.append(x.value)
        else:
            own.append(next(fakes).detach().requires_grad_(i in wanted))
    return own


def _gradients(
    outputs: list[Any],
    params: list[Tensor],
    inputs: list[Any],
    call: Call,
    cotangents: Sequence[Cotangent] | None,
    loss: bool,
    found: _Recorded,
    graph: fx.Graph,
) -> tuple[list[Any], list[Any]]:
    """Of the trained params, and of all inputs; None where there is none."""
    roots, seeds = [], []
    for i, x in enumerate(outputs if call.keep else ()):
        if not isinstance(x, Tensor) or not x.requires_grad or (loss and i):
            continue
        given = cotangents[i] if cotangents is not None else AS_OUTPUT
        if given is None:
            continue
        seeds.append(_seed(x, given))
        found.cotangents[i] = next(reversed(graph.nodes)).name
        roots.append(x)
    wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    if not roots or not (params or wanted):
        return [None] * len(params), [None] * len(inputs)
    grads = iter(torch.autograd.grad(roots, [*params, *wanted], seeds, allow_unused=True))
    weights = [next(grads) for _ in params]
    return weights, [next(grads) if isinstance(x, Tensor) and x.requires_grad else None for x in inputs]


def _seed(x: Tensor, given: tuple[tuple[int, ...], tuple[int, ...], torch.dtype]) -> Tensor:
    """A node that stands for a cotangent."""
    if given == AS_OUTPUT:
        return torch.empty_like(x)
    shape, strides, dtype = given
    return torch.empty_strided(shape, strides, dtype=dtype, device=x.device)


def _fake(spec: Spec) -> Tensor:
    return torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device=spec.device)


def _viewed_as(x: Tensor, spec: Spec) -> Tensor:
    x = torch._neg_view(x) if spec.neg else x
    return x.conj() if spec.conj else x


@contextmanager
def _casting_once() -> Iterator[None]:
    """Let autocast cast a weight once for all its uses, as it does outside of traces."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(True)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        torch.clear_autocast_cache()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Leave the generators, and the caller's settings, as they were."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        generators.extend(torch.cuda.default_generators)
    before = [generator.get_state() for generator in generators]
    level = LOG.level
    LOG.setLevel(logging.CRITICAL)  # what a stage raises is told by whoever runs it for real
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        LOG.setLevel(level)
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


class _Marker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes of each operation what its node does not tell: which draw it is, and what it is called."""

    supports_higher_order_operators = True

    def __init__(self, symbols: ShapeEnv | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.symbols = symbols
        self.marks: dict[str, dict[str, Any]] = {}
        self.seeds: dict[torch.Generator, int] = {}
        self.backward = False

    @property
    def graph(self) -> fx.Graph:
        mode = get_proxy_mode()
        assert mode is not None
        return mode.tracer.graph

    @contextmanager
    def naming(self) -> Iterator[None]:
        token = policies.NAMING.set(lambda name: self._mark(names={name}))
        try:
            yield
        finally:
            policies.NAMING.reset(token)

    def _mark(self, **marks: Any) -> None:
        self.marks.setdefault(next(reversed(self.graph.nodes)).name, {}).update(marks)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._check_writes(func, args, kwargs or {})
        out = func(*args, **(kwargs or {}))
        if draws(func, args, kwargs or {}):
            self._draw(_generator(out, kwargs or {}))
        return out

    def _check_writes(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A write to a real tensor would be one for real."""
        schema = getattr(func, "_schema", None)
        if schema is None or not schema.is_mutable:
            return
        given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | dict(kwargs)
        into = [given.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        if any(isinstance(x, Tensor) and not isinstance(x, FakeTensor) for x in into):
            raise Untraceable("it writes in place to a tensor that it closes over")

    def _draw(self, generator: torch.Generator) -> None:
        seed = generator.initial_seed()
        if not self.backward and self.seeds.setdefault(generator, seed) != seed:
            raise Untraceable(RESEEDS)
        self._mark(draw=(generator.device, seed))
        self.seeds[generator] = _next(seed)
        generator.manual_seed(self.seeds[generator])

    def turn(self) -> None:
        """From here on it is the backward."""
        if any(generator.initial_seed() != seed for generator, seed in self.seeds.items()):
            raise Untraceable(RESEEDS)
        self.backward = True


RESEEDS = "it seeds or restores the global generator, which a graph would not do"


def _next(seed: int) -> int:
    """The seed after a draw, which a run that starts from the same seed comes to as well."""
    return (seed * 6364136223846793005 + 1442695040888963407) % 2**63


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation draws random numbers: attention, for one, does only with dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)
    rates = [a.name for a in func._schema.arguments if a.name == "dropout_p"]
    return not rates or bool(given.get(rates[0], 0.0))


def _generator(out: Any, kwargs: Mapping[str, Any]) -> torch.Generator:
    if isinstance(kwargs.get("generator"), torch.Generator):
        raise Untraceable("it draws from a generator of its own, which a trace would leave in another state")
    drawn = next(x for x in optree.tree_leaves(out) if isinstance(x, Tensor))
    if drawn.device.type != "cuda":
        return torch.default_generator
    index = drawn.device.index
    return torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]


def _assemble(module: fx.GraphModule, call: Call, found: _Recorded, marker: _Marker, read: list[Tensor]) -> Joint:
    nodes = list(module.graph.nodes)
    for node in nodes:
        node.meta["forward"] = node.name in found.forward
        node.meta |= marker.marks.get(node.name, {})
    by_name = {node.name: node for node in nodes}
    output = nodes[-1]
    holders = iter(node for node in nodes if node.op == "placeholder")
    params = [next(holders) if isinstance(x, Spec) else None for x in call.params.leaves]
    inputs = [next(holders) if isinstance(x, Spec) else None for x in call.inputs]
    values = output.args[0]

    def leaves(name: str) -> list[Any]:
        return [values[x.at] if isinstance(x, _Slot) else x for x in found.structure[name]]

    outputs = leaves("outputs")
    cotangents = [by_name[found.cotangents[i]] if i in found.cotangents else None for i in range(len(outputs))]
    return Joint(
        graph=module.graph,
        root=module,
        params=params,
        inputs=inputs,
        cotangents=cotangents,
        outputs=outputs,
        output_spec=found.structure["output_spec"],
        wanted=found.structure["wanted"],
        state=leaves("state"),
        state_spec=found.structure["state_spec"],
        weights=leaves("weights"),
        gradients=leaves("gradients"),
        data=inputs[len(inputs) - len(call.data.leaves) :],
        fakes=read,
    )
