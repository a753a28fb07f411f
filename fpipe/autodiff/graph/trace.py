"""Trace a stage and the gradients of its outputs, once, into one graph of operations.

Invariants:
- Tracing runs no kernel and changes nothing that a caller can observe: tensors are fakes made from specs, and the
  state of the random generators is restored.
- Forward and backward nodes are told apart by when they were traced. A forward that the backward recomputes is
  therefore backward.
- A random draw is identified by the generator's seed. A forward that the stage recomputes restores the seed of its
  first run, so each of its draws matches the draw that it repeats.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import optree
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

from fpipe import policies
from fpipe.autodiff.graph.collectives import Communicates, communicates, is_collective
from fpipe.autodiff.graph.guards import symbolic
from fpipe.autodiff.graph.lost_gradients import refuse_lost
from fpipe.autodiff.graph.products import Products
from fpipe.autodiff.graph.signature import Leaf, Signature, Spec, Static, Tree, Untraceable
from fpipe.devices import all_generators, device_of, without_autocast
from fpipe.devices.operators import draws, written_arguments
from fpipe.errors import StageError
from fpipe.stages.carry import is_root
from fpipe.stages.cuts import Cut
from fpipe.stages.host_rng import DRAWS, noting_host_draws
from fpipe.stages.pytree import Flat, alias_leaves, flatten, paths_of
from fpipe.stages.rng import restored
from fpipe.stages.sharding import has_dtensor
from fpipe.stages.stage import Stage

if TYPE_CHECKING:
    from fpipe.autodiff.graph.sharded import Partitioner

Cotangent = tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None
"""Shape, strides and dtype of an output leaf's cotangent; None where the leaf has none."""
Cotangents = tuple[Cotangent, ...]
AS_OUTPUT: Cotangent = ((-1,), (-1,), torch.float32)
"""Stands for a cotangent with the layout of its output."""
LOG = logging.getLogger("torch._subclasses.fake_tensor")


@dataclass(frozen=True)
class Joint:
    """A traced stage. Lists hold a node for each tensor, and plain values as they are.

    Args:
        root: holds what `get_attr` nodes name.
        params, inputs: placeholders, in the order of the signature's leaves.
        cotangents: by output leaf; None where it has none.
        outputs, state: leaves of the stage's outputs and of its new state.
        weights, gradients: gradients of the trained params, and of all inputs of the signature.
        wanted: by output leaf, whether it requires a gradient.
        fakes: the tensors among the inputs, as traced.
        cuts: the places of the outputs that are pieces, by number.
        partial: numbers of the weights of which each process that computes the stage has a part of the sum.
        donated: how many of the first inputs, leaves of the state, are given up to the forward.
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
    fakes: list[Tensor]
    cuts: dict[int, Cut]
    partial: frozenset[int]
    donated: int = 0

    def map_results(self, function: Callable[[fx.Node], fx.Node]) -> Joint:
        """Return the trace with other nodes as results."""

        def mapped(leaves: list[Any]) -> list[Any]:
            return [function(x) if isinstance(x, fx.Node) else x for x in leaves]

        return replace(
            self,
            outputs=mapped(self.outputs),
            state=mapped(self.state),
            weights=mapped(self.weights),
            gradients=mapped(self.gradients),
        )


def trace(
    stage: Stage,
    signature: Signature,
    cotangents: Sequence[Cotangent] | None,
    loss: bool,
    dynamic: bool = False,
) -> Joint:
    """Trace a stage for a signature.

    Args:
        cotangents: of each output leaf. None: each leaf that can have one gets one with its own layout.
        loss: by default, of the outputs only leaf 0 gets a cotangent.
        dynamic: make the sizes of all inputs symbols.

    Raises:
        StageError: the gradient of a tensor that it closes over would be lost.
        Exception: whatever the stage raises on tensors without values.
    """
    env = ShapeEnv(duck_shape=False) if dynamic else None
    annotator = _Annotator(env)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=env)
    with _settings(), mode, annotator.naming(), _use_lazy_graph_module(True):  # the joint graph is never run
        specs = [x for x in signature.params.leaves if isinstance(x, Spec)]
        params = [_with_bits(_fake(x), x) for x in specs]
        inputs = [x for x in signature.inputs if isinstance(x, Spec)]
        read = [symbolic(x, f"x{i}", mode) if dynamic else _fake(x) for i, x in enumerate(inputs)]
        fakes = [*params, *(_with_bits(x, spec) for x, spec in zip(read, inputs, strict=True))]
        function = _JointFunction(stage, signature, cotangents, loss, annotator)
        try:
            module = make_fx(function, _allow_non_fake_inputs=True, _disable_torch_fn_metadata_mode=True)(fakes)
        except StageError:
            raise
        except Exception as error:
            if annotator.communicates:
                raise Communicates(str(error)) from error
            raise
    return _assemble(module, function, read)


@dataclass
class _JointFunction:
    """A stage with its gradients, as the function of fake tensors that is traced.

    Args:
        seeds: set by the call: by output leaf, the node that stands for its cotangent.
        cuts, partial: set by the call, as in `Joint`.
        outputs, state, weights, gradients: set by the call. The function returns the tensors and symbols among them.
    """

    stage: Stage
    signature: Signature
    cotangents: Sequence[Cotangent] | None
    loss: bool
    annotator: _Annotator
    seeds: dict[int, fx.Node] = field(default_factory=dict)
    cuts: dict[int, Cut] = field(default_factory=dict)
    partial: frozenset[int] = frozenset()
    outputs: Flat = field(init=False)
    state: Flat = field(init=False)
    weights: list[Any] = field(init=False)
    gradients: list[Any] = field(init=False)

    def __call__(self, fakes: list[Tensor]) -> list[Any]:
        signature, rest = self.signature, iter(fakes)
        trees = (signature.params, signature.state, *signature.sources, signature.data)
        leaves = [[_argument(x, rest) for x in tree.leaves] for tree in trees]
        partitioner = _partitioner(signature, self.stage)
        read = leaves
        if partitioner is not None:
            read = [[*_read(partitioner, tree, x)] for tree, x in zip(trees, leaves, strict=True)]
        params, state, *sources, data = (tree.spec.unflatten(x) for tree, x in zip(trees, read, strict=True))
        torch.set_autocast_cache_enabled(True)  # as outside of make_fx, which restores the setting
        partitioned = nullcontext() if partitioner is None else partitioner.running()
        products = Products() if signature.keep else nullcontext()
        with self.annotator, partitioned, products, torch.set_grad_enabled(signature.keep):
            sources = [alias_leaves(tree) for tree in sources]  # autocast caches a leaf's cast, an activation's not
            arguments = self.stage.arguments(dict(zip(self.stage.sources, sources, strict=True)), data)
            with noting_host_draws(self.stage.fn) as has_drawn:
                result, new = self.stage(params, state, arguments)
                if has_drawn():
                    raise Untraceable(f"it {DRAWS}, which a graph would repeat")
            self.outputs, self.state = flatten(alias_leaves(result)), flatten(alias_leaves(new))
            if partitioner is not None:
                self.state = Flat(list(map(partitioner.whole, self.state.leaves)), self.state.spec)
                self._take_outputs(partitioner)
            refuse_lost(self.outputs.leaves, itertools.chain(*leaves), lambda x: not isinstance(x, FakeTensor))
            self.annotator.start_backward()
            if partitioner is not None:
                partitioner.start_backward()
            trained = [read[0][i] for i in signature.trained]
            self.weights, self.gradients = self._gradients(trained, list(itertools.chain.from_iterable(leaves[1:])))
            if partitioner is not None:
                self.weights, self.partial = partitioner.gradients(trained, self.weights)
        if (env := self.annotator.env) is not None:
            _check_sizes([*self.outputs.leaves, *self.state.leaves], env)
        results = (self.outputs.leaves, self.state.leaves, self.weights, self.gradients)
        return [x for leaves in results for x in leaves if _is_traced(x)]

    def _take_outputs(self, partitioner: Partitioner) -> None:
        """Take this process's part of the outputs: its pieces of those that are cut, and the others whole."""
        leaves, spec = self.outputs
        whole = partitioner.whole if self.signature.whole else partitioner.settled
        leaves = list(map(whole, leaves))
        self.cuts = {i: cut for i, x in enumerate(leaves) if (cut := partitioner.cut(x)) is not None}
        self.outputs = Flat(list(map(partitioner.piece, leaves)), spec)

    def _gradients(self, params: list[Tensor], inputs: list[Any]) -> tuple[list[Any], list[Any]]:
        """Return the gradients of the trained params and of all inputs; None where there is none."""
        roots, seeds = [], []
        for i, x in enumerate(self.outputs.leaves if self.signature.keep else ()):
            layout = self.cotangents[i] if self.cotangents is not None else AS_OUTPUT
            if not isinstance(x, Tensor) or not x.requires_grad or layout is None:
                continue
            if not is_root(i, self.outputs.spec, self.loss):
                continue
            seeds.append(_seed(x, layout))
            self.seeds[i] = self.annotator.annotate(cotangent=self.annotator.env is None)
            roots.append(x)
        wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
        if not roots or not (params or wanted):
            return [None] * len(params), [None] * len(inputs)
        with without_autocast():
            grads = iter(torch.autograd.grad(roots, [*params, *wanted], seeds, allow_unused=True))
        weights = [next(grads) for _ in params]
        return weights, [next(grads) if isinstance(x, Tensor) and x.requires_grad else None for x in inputs]


def _check_sizes(leaves: list[Any], env: ShapeEnv) -> None:
    """Raise Untraceable if a plain value depends on a size: the graph would return it as it was traced."""
    names = [str(symbol) for symbol in env.var_to_range]
    for x in leaves:
        if not _is_traced(x) and (isinstance(x, torch.Size) or any(name in str(x) for name in names)):
            raise Untraceable(f"it returns {type(x).__name__} {x}, which depends on sizes")


def _partitioner(signature: Signature, stage: Stage) -> Partitioner | None:
    """Return what computes with pieces; None for a stage whose params and inputs are whole."""
    if not signature.placed:
        return None
    from fpipe.autodiff.graph.sharded import Partitioner  # imports torch.distributed.tensor, which takes time

    return Partitioner(signature.placed, stage.sequence, stage.local)


def _read(partitioner: Partitioner, tree: Tree, leaves: Sequence[Any]) -> Iterator[Any]:
    placed = (x.placed if isinstance(x, Spec) else None for x in tree.leaves)
    return map(partitioner.read, leaves, placed, paths_of(tree.spec))


def _is_traced(x: Any) -> bool:
    return isinstance(x, Tensor | torch.SymInt | torch.SymFloat | torch.SymBool)


def _argument(x: Leaf, fakes: Iterator[Tensor]) -> Any:
    return x.value if isinstance(x, Static) else next(fakes).detach().requires_grad_(x.wanted)


def _seed(x: Tensor, layout: tuple[tuple[int, ...], tuple[int, ...], torch.dtype]) -> Tensor:
    """Return a tensor whose node stands for a cotangent."""
    if layout == AS_OUTPUT:
        return torch.empty_like(x)
    shape, strides, dtype = layout
    return torch.empty_strided(shape, strides, dtype=dtype, device=x.device)


def _fake(spec: Spec) -> Tensor:
    return torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device=spec.device)


def _with_bits(x: Tensor, spec: Spec) -> Tensor:
    """Set the conjugate and negative bits of a spec."""
    x = torch._neg_view(x) if spec.neg else x
    return x.conj() if spec.conj else x


@contextmanager
def _settings() -> Iterator[None]:
    """Restore the random generators afterwards. Meanwhile run autograd on this thread, and log no errors."""
    disabled, LOG.disabled = LOG.disabled, True  # the caller reports what a stage raises
    try:
        with restored(all_generators()), torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        LOG.disabled = disabled
        torch.clear_autocast_cache()  # of casts of fakes


class _Annotator(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Annotates nodes while they are traced: which draw a node is, and the names that the stage gave it."""

    supports_higher_order_operators = True

    def __init__(self, env: ShapeEnv | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.env = env
        self.seeds = {generator: generator.initial_seed() for generator in all_generators()}
        self.backward = False
        self.communicates = False

    @property
    def graph(self) -> fx.Graph:
        mode = get_proxy_mode()
        assert mode is not None
        return mode.tracer.graph

    @contextmanager
    def naming(self) -> Iterator[None]:
        token = policies.NAMING.set(lambda name: self.annotate(names={name}))
        try:
            yield
        finally:
            policies.NAMING.reset(token)

    def annotate(self, **meta: Any) -> fx.Node:
        """Annotate the latest node, and return it."""
        node: fx.Node = next(reversed(self.graph.nodes))
        node.meta |= meta
        return node

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):  # often; short for what follows
            return args[0].fake_device
        kwargs = kwargs or {}
        if has_dtensor(types):
            return NotImplemented  # the operations on pieces come here too
        if communicates(func):
            self.communicates = True
            if not is_collective(func) or func._schema.is_mutable:
                raise Untraceable(f"{func} writes to its argument: take the function of fpipe.parallel instead")
        if any(isinstance(x, Tensor) and not isinstance(x, FakeTensor) for x in written_arguments(func, args, kwargs)):
            raise Untraceable("it writes in place to a tensor that it closes over")
        out = func(*args, **kwargs)
        if draws(func, args, kwargs):
            self._draw(_generator(out, kwargs))
        return out

    def _draw(self, generator: torch.Generator) -> None:
        seed = generator.initial_seed()
        if not self.backward and self.seeds.setdefault(generator, seed) != seed:  # CUDA's may have begun since
            raise Untraceable(RESEEDS)
        self.annotate(draw=(generator.device, seed))
        self.seeds[generator] = _next(seed)
        generator.manual_seed(self.seeds[generator])

    def start_backward(self) -> None:
        """Count the nodes from here on as backward."""
        if any(generator.initial_seed() != seed for generator, seed in self.seeds.items()):
            raise Untraceable(RESEEDS)
        self.backward = True
        for node in self.graph.nodes:
            node.meta["forward"] = True


RESEEDS = "it seeds or restores the global generator, which a graph would not do"


def _next(seed: int) -> int:
    """Return the seed after a draw. It depends on the seed before alone, so that a repeated run gets the same."""
    return (seed * 6364136223846793005 + 1442695040888963407) % 2**63


def _generator(out: Any, kwargs: Mapping[str, Any]) -> torch.Generator:
    if isinstance(kwargs.get("generator"), torch.Generator):
        raise Untraceable("it draws from a generator of its own, which a trace would leave in another state")
    drawn = next(x for x in optree.tree_leaves(out) if isinstance(x, Tensor))
    return device_of(drawn.device).generators()[-1]


def _assemble(module: fx.GraphModule, function: _JointFunction, fakes: list[Tensor]) -> Joint:
    signature, nodes = function.signature, list(module.graph.nodes)
    for node in nodes:
        node.meta.setdefault("forward", False)
    placeholders = iter(node for node in nodes if node.op == "placeholder")
    results = iter(nodes[-1].args[0])

    def resolved(leaves: list[Any]) -> list[Any]:
        return [next(results) if _is_traced(x) else x for x in leaves]

    return Joint(
        graph=module.graph,
        root=module,
        params=[next(placeholders) if isinstance(x, Spec) else None for x in signature.params.leaves],
        inputs=[next(placeholders) if isinstance(x, Spec) else None for x in signature.inputs],
        cotangents=[function.seeds.get(i) for i in range(len(function.outputs.leaves))],
        outputs=resolved(function.outputs.leaves),
        output_spec=function.outputs.spec,
        wanted=[signature.keep and isinstance(x, Tensor) and x.requires_grad for x in function.outputs.leaves],
        state=resolved(function.state.leaves),
        state_spec=function.state.spec,
        weights=resolved(function.weights),
        gradients=resolved(function.gradients),
        fakes=fakes,
        cuts=function.cuts,
        partial=function.partial,
    )
