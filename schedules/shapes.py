"""The shape of a decoder-only transformer, and the arithmetic that follows from it: parameters, FLOPs, bytes. No torch.

FLOPs count a multiplication and an addition as two, and attention scores whole, also the half that a causal mask
drops, as in the published figures (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM", SC 2021, appendix). Activations are those of Korthikanti et al., "Reducing Activation Recomputation
in Large Transformer Models", MLSys 2023, section 4.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import ceil

from fpipe.errors import ScheduleError


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of a forward and of the two halves of its backward.

    Args:
        again: those of a forward that a backward repeats, where it keeps only the input.
        padding: those of a forward for slots of experts that no token takes.
    """

    forward: float
    backward_input: float
    backward_weight: float
    again: float
    padding: float = 0.0

    @property
    def model(self) -> float:
        """Those that the model needs, whatever a device repeats: a backward takes twice the forward."""
        return 3 * (self.forward - self.padding)


@dataclass(frozen=True)
class Kept:
    """Bytes that a microbatch leaves on a rank.

    Args:
        residuals: from a forward to its backward, if every value that the backward needs is kept.
        deferred: from an input gradient to its weight gradient: inputs of matrix products, and cotangents of their
            outputs.
        collectives: results of collectives that are kept even where all else is computed again.
    """

    residuals: float
    deferred: float
    collectives: float


@dataclass(frozen=True)
class ModelShape:
    """The shape of a decoder-only transformer.

    Args:
        layers, hidden, heads, vocabulary: their numbers; `hidden` is the width.
        sequence: tokens of a sequence.
        kv_heads: heads of keys and values (grouped-query attention); by default `heads`.
        feed_forward: the inner width of the feed-forward part; by default 4 * hidden.
        gated: whether that part has a gate: three matrices, not two (SwiGLU).
        tied: whether the embedding is also the head's matrix.
        biases: whether matrix products have biases, and norms too (LayerNorm, not RMSNorm).
        positions: whether positions are learned, one vector for each token of a sequence.
        dropout: whether there is dropout, whose masks are kept.
        fused_attention: whether attention keeps no scores (FlashAttention).
        experts: the feed-forward parts of a layer, of which a router chooses some for each token; by default there is
            one part, for all tokens.
        experts_per_token: how many it chooses.
        capacity_factor: by how much the slots of experts exceed the choices, as in `parallel.mixture_of_experts`. All
            slots are computed, and are evenly filled here.

    Raises:
        ScheduleError: a number below 1, or numbers that do not divide each other; more experts for a token than there
            are.

    >>> ModelShape(layers=2, hidden=8, heads=2, vocabulary=10, sequence=4).parameters
    1736
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    kv_heads: int | None = None
    feed_forward: int | None = None
    gated: bool = False
    tied: bool = False
    biases: bool = False
    positions: bool = False
    dropout: bool = False
    fused_attention: bool = True
    experts: int | None = None
    experts_per_token: int = 1
    capacity_factor: float = 1.25

    def __post_init__(self) -> None:
        for field in fields(self):
            number = getattr(self, field.name)
            if number is not None and not isinstance(number, bool) and number < 1:
                raise ScheduleError(f"{field.name} of a model must be at least 1, not {number}")
        if self.hidden % self.heads or self.heads % self.key_heads:
            raise ScheduleError(
                f"{self.heads} heads must divide the width of {self.hidden}, and {self.key_heads} heads of keys and "
                f"values the {self.heads} heads"
            )
        if self.experts_per_token > (self.experts or 1):
            raise ScheduleError(
                f"a token can't have {self.experts_per_token} of {self.experts or 1} experts: experts_per_token is at "
                "most experts"
            )

    @property
    def key_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def inner(self) -> int:
        """The inner width of the feed-forward part."""
        return self.feed_forward or 4 * self.hidden

    @property
    def keys(self) -> int:
        """The width of all keys of a token; that of the values is the same."""
        return self.hidden // self.heads * self.key_heads

    @property
    def _attention(self) -> int:
        """The numbers in the matrices of an attention."""
        return 2 * self.hidden * (self.hidden + self.keys)

    @property
    def _network(self) -> int:
        """The numbers in the matrices of a feed-forward part, or of one expert."""
        return (3 if self.gated else 2) * self.hidden * self.inner

    @property
    def _products(self) -> int:
        """The numbers in the matrices of a layer that a token meets."""
        router = self.hidden * (self.experts or 0)
        return self._attention + router + self.experts_per_token * self._network

    @property
    def _padding(self) -> float:
        """The numbers in matrices of experts that are multiplied by slots without a token, for each token."""
        return (self.slots - self.experts_per_token) * self._network if self.experts else 0.0

    @property
    def slots(self) -> float:
        """The slots of experts for each token."""
        return min(self.capacity_factor * self.experts_per_token, self.experts or 1)

    @property
    def _expert(self) -> int:
        """The parameters of a feed-forward part, or of one expert."""
        return self._network + (self.inner + self.hidden if self.biases else 0)

    @property
    def expert_parameters(self) -> int:
        """The parameters of all experts of a layer."""
        return (self.experts or 0) * self._expert

    @property
    def layer_parameters(self) -> int:
        norms = 2 * self.hidden
        biases = 2 * self.hidden + 2 * self.keys + norms if self.biases else 0
        networks = self.hidden * self.experts + self.expert_parameters if self.experts else self._expert
        return self._attention + networks + biases + norms

    @property
    def embedding_parameters(self) -> int:
        return self.hidden * (self.vocabulary + (self.sequence if self.positions else 0))

    @property
    def head_parameters(self) -> int:
        """The parameters of the last norm and of the head's matrix, which may be the embedding's."""
        return self.hidden * (self.vocabulary + (2 if self.biases else 1))

    @property
    def parameters(self) -> int:
        """All parameters; a tied matrix counts once."""
        tied = self.hidden * self.vocabulary if self.tied else 0
        return self.layers * self.layer_parameters + self.embedding_parameters + self.head_parameters - tied

    @property
    def active_parameters(self) -> int:
        """Those that a token meets: with experts, those of the chosen ones.

        >>> f"{SHAPES['mixtral-8x7b'].active_parameters:.3g} of {SHAPES['mixtral-8x7b'].parameters:.3g}"
        '1.29e+10 of 4.67e+10'
        """
        return self.parameters - self.layers * ((self.experts or 1) - self.experts_per_token) * self._expert

    def layer_flops(self, tokens: float) -> Flops:
        """Return the FLOPs of a layer for so many tokens of whole sequences.

        The backward of a fused attention computes the scores again, 5 products in place of 4 (Dao, "FlashAttention-2",
        2023, section 3.1).
        """
        padding = 2.0 * tokens * self._padding
        products, scores = 2.0 * tokens * self._products + padding, 4.0 * tokens * self.sequence * self.hidden
        whole = products + scores
        return Flops(whole, products + (2.5 if self.fused_attention else 2) * scores, products, whole, padding)

    def head_flops(self, tokens: float) -> Flops:
        """Return the FLOPs of the head for so many tokens."""
        product = 2.0 * tokens * self.hidden * self.vocabulary
        return Flops(product, product, product, again=product)

    def step_flops(self, tokens: float) -> float:
        """Return the FLOPs that the model needs for a step of so many tokens: Narayanan et al., equation 3.

        >>> GPT_175B = ModelShape(96, 12288, 96, vocabulary=51200, sequence=2048)
        >>> f"{GPT_175B.step_flops(tokens=1) / (6 * GPT_175B.parameters):.3f}"
        '1.024'
        """
        return self.layers * self.layer_flops(tokens).model + self.head_flops(tokens).model

    def layer_kept(
        self,
        rows: int,
        itemsize: int = 2,
        *,
        tp: int = 1,
        cp: int = 1,
        sequence_parallel: bool = False,
        gathered_again: bool = False,
        ep: int = 1,
    ) -> Kept:
        """Return the bytes that a layer keeps on a rank for a microbatch of so many sequences.

        With experts it keeps the inputs of all slots in place of one, the outputs of the chosen ones, for the gradients
        of their weights, and the router's probabilities. These are the same on any number of ranks: each computes the
        slots that all have for its experts.

        With dropout and without a fused attention the residuals are those of Korthikanti et al.: equation 1; equation 2
        with `tp`; equation 4 with `sequence_parallel` and `gathered_again`.

        Args:
            itemsize: bytes of a number of an activation.
            tp: ranks that share each layer's heads and inner width.
            cp: ranks that share each sequence. Keys and values are kept whole, as they are gathered.
            sequence_parallel: whether the `tp` ranks also share the tokens between the matrix products.
            gathered_again: whether the backward gathers the inputs of the products again, in place of keeping them
                gathered, as a traced stage does.
            ep: ranks over which the experts are spread.

        >>> shape = ModelShape(1, 12288, 96, 51200, 2048, dropout=True, fused_attention=False)
        >>> shape.layer_kept(rows=1).residuals / (2048 * 12288)  # 34 + 5 * heads * sequence / hidden
        114.0
        """
        h, keys, tokens = self.hidden, self.keys / tp, rows * self.sequence / cp
        slots, inner = self.slots, self.slots * self.inner / tp  # without experts there is one slot for each token
        moved, chosen = (h * count if self.experts else 0.0 for count in (slots, self.experts_per_token))
        router = 4.0 * (self.experts or 0)  # its numbers are float32
        shared = tp if sequence_parallel else 1
        inputs = itemsize * 2 * h / (shared if gathered_again else 1)  # of the first product of either part
        between = (itemsize * 2 * h + (2 * h if self.dropout else 0)) / shared  # inputs of norms, and masks
        products = itemsize * (2 * h / tp + (4 if self.gated else 2) * inner)  # queries, and inputs of second products
        gathered = itemsize * 2 * keys * cp
        if self.fused_attention:
            scores = 4.0 * self.heads / tp  # one sum, in float32, for each query
        else:
            each = itemsize + (1 + itemsize if self.dropout else 0)
            scores = each * self.heads / tp * self.sequence
        cotangents = itemsize * (h + (moved or h) + h / tp + 2 * keys + (2 if self.gated else 1) * inner)
        deferred = inputs + itemsize * (h / tp + inner + moved) + cotangents + router
        results = (itemsize * 2 * h * (1 + 1 / shared if sequence_parallel else 1) if tp > 1 else 0) + (
            gathered if cp > 1 else 0
        )
        results += itemsize * 2 * moved if ep > 1 else 0
        per_token = inputs + between + products + gathered + scores + itemsize * (moved + chosen) + router
        return Kept(tokens * per_token, tokens * deferred, tokens * results)

    def head_kept(self, rows: int, itemsize: int = 2, *, tp: int = 1, cp: int = 1) -> Kept:
        """Return the bytes that the head and its loss keep: Korthikanti et al., section 4.3; logits are float32."""
        tokens, vocabulary = rows * self.sequence / cp, ceil(self.vocabulary / tp)
        ends = itemsize * self.hidden
        return Kept(tokens * (2 * ends + 4 * vocabulary), tokens * (ends + itemsize * vocabulary), tokens * 0.0)


# Published: Radford et al. 2019; Llama Team, "The Llama 3 Herd of Models", 2024, table 3; Jiang et al., "Mixtral of
# Experts", 2024, table 1.
SHAPES = {
    "gpt2": ModelShape(12, 768, 12, 50257, 1024, tied=True, biases=True, positions=True, dropout=True),
    "llama-8b": ModelShape(32, 4096, 32, 128256, 8192, kv_heads=8, feed_forward=14336, gated=True),
    "llama-70b": ModelShape(80, 8192, 64, 128256, 8192, kv_heads=8, feed_forward=28672, gated=True),
    "mixtral-8x7b": ModelShape(
        32, 4096, 32, 32000, 8192, kv_heads=8, feed_forward=14336, gated=True, experts=8, experts_per_token=2
    ),
    "mixtral-8x22b": ModelShape(
        56, 6144, 48, 32000, 8192, kv_heads=8, feed_forward=16384, gated=True, experts=8, experts_per_token=2
    ),
}
