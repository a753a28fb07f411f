"""Train a Llama of Hugging Face in three dimensions: pipeline, replicas with sharded parameters, and tensor parallel.

    torchrun --standalone --nproc-per-node 8 examples/llama_3d.py                      2 x 2 x 2 processes
    torchrun --standalone --nproc-per-node 8 examples/llama_3d.py --check              the same, beside one process
    torchrun --standalone --nproc-per-node 8 examples/llama_3d.py --resident 1 --schedule looped-bfs
    torchrun --standalone --nproc-per-node 8 examples/llama_3d.py --sequence-parallel  activations cut by tokens

With --checkpoint FOLDER it saves there at the end, and goes on from there on any other mesh, as with --pp 4 --dp 1. The
weights are random and nothing is downloaded. --check compares the gradients of the first step and the losses of five
with those of one process, and goes on from a checkpoint on 4 x 1 x 2 processes; it fails where they differ by more than
rounding does.
"""

import os
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import typer
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import fpipe
from fpipe import Placement, handlers, interop
from fpipe.interop.transformers import split

VOCABULARY, LENGTH, ROWS, MICROBATCHES, STAGES = 96, 16, 16, 8, 4
ADAMW = interop.optimizer(torch.optim.AdamW, lr=3e-3)
STYLE = interop.styles.megatron(
    column=["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"],
    row=["o_proj", "down_proj"],
    vocabulary=["embed_tokens", "lm_head"],
)
BOUNDS = {"loss of step 0": 1e-6, "gradients": 1e-5, "losses of steps 1 to 4": 1e-4, "loss on another mesh": 1e-4}


def make() -> tuple[fpipe.Pipeline, Any]:
    """Return the pipeline and its params, the same in every process."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=STAGES, **sizes))
    example = {name: rows[: ROWS // MICROBATCHES] for name, rows in batch(0).items()}
    return split(model, example=example, stages=STAGES, policy="balanced")


def batch(step: int) -> dict[str, Tensor]:
    """Return rows of text whose second half repeats the first."""
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(VOCABULARY, (ROWS, LENGTH // 2), generator=generator).repeat(1, 2)
    return {"input_ids": text, "labels": text}


@dataclass
class Mesh:
    """A pipeline on processes in three dimensions, with its params and the optimizer's state.

    Args:
        shape: the numbers of processes: ranks of the pipeline, replicas, and those that compute a stage together.
        resident: how many stages of a rank are whole at a time.
        sequence_parallel: cut activations along their tokens, between layers and between stages.
    """

    shape: tuple[int, int, int]
    schedule: str
    resident: int
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        cuda = torch.cuda.is_available()
        self.mesh = init_device_mesh("cuda" if cuda else "cpu", self.shape, mesh_dim_names=("pp", "dp", "tp"))
        ranks, self.replicas, _ = self.shape
        replicated: dict[str, Any] = {"replicas": self.mesh["dp"]} if self.replicas > 1 else {}
        self.handler = handlers.Distributed(self.mesh["pp"], **replicated)
        pipeline, params = make()
        pipeline = pipeline.sequence_parallel() if self.sequence_parallel else pipeline
        self.stages = pipeline.stages
        v = self.schedule in ("zb-v", "v-half", "v-min", "dualpipe-v")
        placement = Placement.v(ranks) if v else Placement.loop(ranks, STAGES // ranks)
        self.plan = pipeline.plan(placement, MICROBATCHES // self.replicas, replicas=self.replicas)
        params = interop.shard(params, self.mesh["tp"], STYLE)
        options: dict[str, Any] = {}
        if self.replicas > 1:
            params, options = interop.fsdp(params, self.mesh["dp"]), {"resident": self.resident}
        self.params = pipeline.params_on(params, self.plan, self.handler)
        self.state = ADAMW.init(self.params)
        self.value_and_grad = fpipe.value_and_grad(pipeline, self.schedule, self.plan, handler=self.handler, **options)

    def step(self, number: int) -> tuple[Tensor, Any]:
        """Take an optimizer step; return the loss and the gradients."""
        count = ROWS // self.replicas
        first = count * self.mesh["dp"].get_local_rank()
        rows = {name: x[first : first + count].to(self.handler.device) for name, x in batch(number).items()}
        loss, grads = self.value_and_grad(self.params, rows)
        clipped, _ = fpipe.clip_by_global_norm(grads, 1.0, self.plan, handler=self.handler)
        self.params, self.state = ADAMW.update(clipped, self.state, self.params)
        return loss, grads

    def save(self, folder: Path, step: int) -> None:
        self.handler.check()
        dcp.save(named(self.params, self.state) | {"step": torch.tensor(step)}, checkpoint_id=folder)

    def load(self, folder: Path) -> int:
        """Load what any mesh has saved; return the number of the next step."""
        self.state = {
            stage: {name: {} if name in self.stages[stage].frozen else blank(x) for name, x in tree.items()}
            for stage, tree in self.params.items()
        }
        step = torch.tensor(0)
        dcp.load(named(self.params, self.state) | {"step": step}, checkpoint_id=folder)
        return int(step)


def named(params: Any, state: Any) -> dict[str, Tensor]:
    """Return the tensors of params and of AdamW's state by name, as `torch.distributed.checkpoint` takes them."""
    leaves = {f"params.{stage}.{name}": x for stage, tree in params.items() for name, x in tree.items()}
    for stage, tree in state.items():
        leaves |= {f"adamw.{stage}.{name}.{key}": x for name, each in tree.items() for key, x in each.items()}
    return leaves


def blank(leaf: Tensor) -> dict[str, Tensor]:
    """Return the state of AdamW before the first update."""
    return {"exp_avg": torch.zeros_like(leaf), "exp_avg_sq": torch.zeros_like(leaf), "step": torch.tensor(0.0)}


def check(trained: Mesh, folder: Path) -> dict[str, float]:
    """Return how far training on a mesh is from training in one process, by relative differences."""
    pipeline, params = make()
    plan = pipeline.plan(Placement.loop(1, STAGES), MICROBATCHES)
    step = fpipe.value_and_grad(pipeline, "gpipe", plan, handler=handlers.Reference())
    state, expected = ADAMW.init(params), []
    for number in range(6):
        loss, grads = step(params, batch(number))
        if number == 0:
            first = grads
        clipped, _ = fpipe.clip_by_global_norm(grads, 1.0, plan, handler=handlers.Reference())
        params, state = ADAMW.update(clipped, state, params)
        expected.append(loss.item())

    values, grads = zip(*(trained.step(number) for number in range(5)), strict=True)
    losses = [abs(a.item() - b) / b for a, b in zip(values, expected, strict=False)]
    leaves = [
        (whole(x), first[stage][name]) for stage, tree in grads[0].items() for name, x in tree.items() if x is not None
    ]
    gradients = torch.stack([(x - y).norm() / y.norm() for x, y in leaves]).amax().item()  # NaN if one is
    trained.save(folder, 5)
    other = Mesh((4, 1, 2), "1f1b", 1, trained.sequence_parallel)
    again = abs(other.step(other.load(folder))[0].item() - expected[5]) / expected[5]
    return dict(zip(BOUNDS, (losses[0], gradients, torch.tensor(losses[1:]).amax().item(), again), strict=True))


def whole(leaf: Tensor) -> Tensor:
    return (leaf.full_tensor() if isinstance(leaf, DTensor) else leaf).cpu()


def report(differences: dict[str, float]) -> bool:
    """Print the worst differences of all processes; return whether they are rounding."""
    worst = torch.tensor([*differences.values()], dtype=torch.float64)
    every = [torch.empty_like(worst) for _ in range(dist.get_world_size())]
    dist.all_gather(every, worst)
    right = True
    for name, value in zip(differences, torch.stack(every).amax(0).tolist(), strict=True):
        right &= value <= BOUNDS[name]
        if dist.get_rank() == 0:
            print(
                f"{name}: {value:.1e} relative, at most {BOUNDS[name]:.0e}{'' if value <= BOUNDS[name] else ': WRONG'}"
            )
    return right


def main(
    pp: Annotated[int, typer.Option(help="Ranks of a pipeline.")] = 2,
    dp: Annotated[int, typer.Option(help="Replicas, over which parameters are sharded too.")] = 2,
    schedule: Annotated[str, typer.Option(help="A schedule's name; zb-v needs two stages on a rank.")] = "zb-v",
    resident: Annotated[int, typer.Option(help="Whole stages on a rank at a time.")] = 2,
    sequence_parallel: Annotated[bool, typer.Option(help="Cut activations along their tokens.")] = False,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 40,
    checkpoint: Annotated[Path | None, typer.Option(help="Where to save, and to go on from.")] = None,
    compare: Annotated[bool, typer.Option("--check", help="Compare five steps with those of one process.")] = False,
) -> None:
    """Train a small Llama in three dimensions; the processes that pp x dp leave compute stages together."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    shape = pp, dp, dist.get_world_size() // (pp * dp)
    trained = Mesh(shape, schedule, resident, sequence_parallel)
    right = True
    if compare:
        with ExitStack() as stack:
            folder = [stack.enter_context(tempfile.TemporaryDirectory()) if dist.get_rank() == 0 else ""]
            dist.broadcast_object_list(folder)
            right = report(check(trained, Path(folder[0])))
    else:
        begun = trained.load(checkpoint) if checkpoint and checkpoint.exists() else 0
        for number in range(begun, begun + steps):
            loss, _ = trained.step(number)
            if dist.get_rank() == 0 and (number % 10 == 0 or number + 1 == begun + steps):
                print(f"step {number}: loss {loss:.4f}", flush=True)
        if checkpoint:
            trained.save(checkpoint, begun + steps)
    dist.destroy_process_group()
    sys.exit(not right)


if __name__ == "__main__":
    typer.run(main)
