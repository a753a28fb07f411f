"""Models trained on meshes of three dimensions, beside one process."""

from __future__ import annotations

import functools

import optree
import torch
from torch.distributed.tensor import Shard

import fpipe
from fpipe import handlers, interop
from tests.support import expert_jobs, tensor_jobs
from tests.support.catalogue import ORDERS
from tests.support.shards import mesh_of, whole
from tests.support.split_cases import exported_once

VOCABULARY, WIDTH, HEADS, LENGTH = 30, 16, 4, 6
ROWS, STEPS, SEED = 8, 5, 7  # rows are of all replicas together, and each is a microbatch
NOISE = 1e-6  # a leaf whose gradient is zero but for rounding has less than this share of the norm of all


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": 4, "n_head": HEADS}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    layers = ["c_attn", "c_fc", "c_proj"]
    return (
        GPT2LMHeadModel(GPT2Config(**sizes, **ends, attn_pdrop=0.0)),
        [f"transformer.h.{i}" for i in (1, 2, 3)],
        {
            "column": layers[:2],
            "row": layers[2:],
            "vocabulary": ["wte"],
            "transposed": layers,
            "fused": {"c_attn": 3},
        },
    )


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": HEADS}
    return (
        LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes)),
        [f"model.layers.{i}" for i in (1, 2, 3)],
        tensor_jobs.STYLE,
    )


def bert():
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": HEADS}
    config = BertConfig(
        vocab_size=VOCABULARY, max_position_embeddings=LENGTH, attention_probs_dropout_prob=0.0, **sizes
    )
    return (
        BertForMaskedLM(config),
        [f"bert.encoder.layer.{i}" for i in (1, 2, 3)],
        {
            "column": ["query", "key", "value", "intermediate.dense"],
            "row": ["output.dense"],
            "vocabulary": ["word_embeddings"],
        },
    )


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": WIDTH, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": HEADS}
    config = T5Config(vocab_size=VOCABULARY, relative_attention_num_buckets=4, decoder_start_token_id=0, **sizes)
    return (
        T5ForConditionalGeneration(config),
        ["encoder.block.1", "decoder.block.0", "decoder.block.1"],
        {
            "column": ["q", "k", "v", "wi", "relative_attention_bias"],
            "row": ["o", "wo"],
            "vocabulary": ["shared"],
            "transposed": ["relative_attention_bias"],
        },
    )


TRANSFORMERS = {f.__name__: f for f in (llama, gpt2, bert, t5)}


@functools.cache
def text():
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(1, VOCABULARY, (2, ROWS, LENGTH), generator=generator)
    mask = torch.ones_like(tokens)
    mask[::3, LENGTH - 2 :] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


@functools.cache
def module_of(name):
    torch.manual_seed(0)
    return (*TRANSFORMERS[name](), [])


@functools.cache
def split(name, stages):
    """A pipeline, its params and their style; a model is exported once in a process."""
    module, cuts, style, exports = module_of(name)
    cuts = {1: [], 2: cuts[1:2], 4: cuts}[stages]
    with exported_once(*exports) as seen:
        options = {"at": cuts} if cuts else {"stages": 1}
        example = {key: x[:2] for key, x in text().items()}
        pipeline, params = interop.transformers.split(module, example=example, **options)
    exports[:] = seen
    return pipeline, params, interop.styles.megatron(**style)


class Transformer:
    """A model of `transformers`, or blocks of a small one that needs no export, over processes of (pp, dp, tp)."""

    def __init__(self, name, stages, shape):
        self.mesh = mesh_of(*shape, names=("pp", "dp", "tp"))
        self.replicas, self.microbatches, self.options = shape[1], ROWS // shape[1], {}
        self.handler_options = {"replicas": self.mesh["dp"]} if self.replicas > 1 else {}
        if name == "blocks":
            self.pipeline, self.params = tensor_jobs.llama(stages, dropout=0.25, heads=8)
            self.style, self.arguments = interop.styles.megatron(**tensor_jobs.STYLE), tensor_jobs.data()
        else:
            self.pipeline, self.params, self.style = split(name, stages)
            self.arguments = (text(),)

    @property
    def sharded(self):
        return interop.shard(self.params, self.mesh["tp"], self.style)

    @property
    def reference(self):
        return self.pipeline


class Experts:
    """Layers of experts, with drops and balance losses, over processes of (pp, dp, ep)."""

    style = None

    def __init__(self, name, stages, shape):
        self.mesh = mesh_of(*shape, names=("pp", "dp", "ep"))
        self.replicas, self.microbatches = shape[1] * shape[2], expert_jobs.MICROBATCHES
        self.handler_options = {"replicas": self.mesh["dp", "ep"], "experts": "ep"}
        self.pipeline, self.reference = (
            expert_jobs.pipeline_of(stages, 2, 0.75, group) for group in (self.mesh["ep"], None)
        )
        self.params, self.options = expert_jobs.params_of(stages), {"has_aux": True}
        self.arguments = expert_jobs.batch_of(self.microbatches * self.replicas)

    @property
    def sharded(self):
        return interop.shard(self.params, self.mesh["ep"], {"experts.*": [Shard(0)]})


MODELS = {"blocks": Transformer, **dict.fromkeys(TRANSFORMERS, Transformer), "experts": Experts}


@functools.cache
def model_of(name, stages, shape):
    return MODELS[name](name, stages, shape)


EXPECTED = {}


def expected(name, stages, model):
    """Of one process, by the reference."""
    microbatches = model.microbatches * model.replicas
    key = name, stages, microbatches
    if key not in EXPECTED:
        plan = model.reference.plan(fpipe.Placement.loop(ranks=1, chunks=stages), microbatches)
        step = tensor_jobs.step_of("gpipe", model.reference, plan, handlers.Reference(), **model.options)
        EXPECTED[key] = tensor_jobs.trained(step, model.params, model.arguments, STEPS, SEED, plan)
    return EXPECTED[key]


def train(rank, name, schedule, shape):
    """Errors of losses, gradients and norm, and whether gradients are placed as params are.

    Looped BFS cuts leaves over the replicas too, and gathers a stage at a time.
    """
    entry = ORDERS[schedule]
    placement = entry.place(shape[0], entry.chunks)
    model = model_of(name, placement.stages, shape)
    plan = model.pipeline.plan(placement, model.microbatches, replicas=model.replicas)
    handler = handlers.Distributed(model.mesh["pp"], **model.handler_options, timeout=60)
    params, options = model.sharded, model.options
    if shape[1] > 1 and schedule == "looped_bfs":
        params, options = interop.fsdp(params, model.mesh["dp"]), {**options, "resident": 1}
    own = model.pipeline.params_on(params, plan, handler)
    step = tensor_jobs.step_of(schedule, model.pipeline, plan, handler, **options)
    rows = optree.tree_map(lambda x: x.chunk(model.replicas)[handler.grid.replica], model.arguments)
    results = tensor_jobs.trained(step, own, rows, STEPS, SEED, plan, handler)
    return errors(results, expected(name, placement.stages, model), own)


def errors(results, wanted, own):
    """Relative ones: first and fifth loss, gradients by leaf, norm; and whether gradients are placed as `own` is.

    The gradient of a bias of keys is zero, for a softmax has no use for it, and so is compared with all others' norm.
    """
    (losses, grads, norm), (losses0, grads0, norm0) = results, wanted
    first, fifth = (abs(losses[i] - losses0[i]) / abs(losses0[i]) for i in (0, STEPS - 1))
    trees, distances = [leaves(tree) for tree in (whole(grads), grads0, grads, own)], {}
    for path, x in trees[0].items():
        x0 = trees[1][path]
        size = x0.norm()
        distances[path] = ((x - x0).norm() / (size if size > NOISE * norm0 else norm0)).item()
    alike = all(placed(x) == placed(trees[3][path]) for path, x in trees[2].items())
    return first, fifth, distances, (abs(norm - norm0) / norm0).item(), alike


def placed(leaf):
    return getattr(leaf, "placements", None)


def leaves(tree):
    """By path; those that are not trained have no gradient."""
    return dict(zip(*optree.tree_flatten_with_path(tree, namespace="fpipe")[:2], strict=True))
