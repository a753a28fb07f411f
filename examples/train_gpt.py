"""Train a byte-level GPT in pipeline stages, on the source of Python's standard library.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py     one rank in each process, over gloo
    python examples/train_gpt.py --ranks 2                             all ranks in this process

With --checkpoints FOLDER it saves regularly and when it gets SIGTERM, and resumes from there when it is started again,
by a person or by torchrun (--max-restarts 3): with the same bits, on any number of ranks, if each process has the same
number of threads (OMP_NUM_THREADS). With another seed, text or number of steps it raises an error. Ctrl-C ends all
ranks, after which torchrun shows a traceback of its own. On several machines, start
`torchrun --nnodes 2 --rdzv-backend c10d --rdzv-id ID --rdzv-endpoint HOST:PORT ...` on each. With --stages the model
has as many stages on any number of ranks, and `--nnodes 1:2` goes on when a machine is lost: docs/hosts.md.
"""

import math
import os
import signal
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

import fpipe
from fpipe import handlers, interop, schedules
from fpipe.tensorboard import Recorder

console = Console(highlight=False)
# The others run slices of sequences, or parts of a vocabulary: see long_sequences.py, and gpt2_tied.py --split.
SCHEDULES = [name for name, entry in schedules.CATALOGUE.items() if entry.slices in (None, 1) and not entry.edges]


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rate = self.dropout if self.training else 0.0
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        x = x + F.dropout(self.mix(mixed.transpose(1, 2).flatten(2)), rate)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), rate)


class GPT(nn.Module):
    """A GPT over bytes; it contains nothing about pipelines."""

    def __init__(self, layers: int, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, width // 32, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.dropout(self.bytes(text.long()) + self.positions.weight[: text.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def cuts(model: GPT, stages: int) -> list[str]:
    """Return the blocks at which to split, for stages of nearly equal numbers of blocks."""
    return [f"blocks.{len(model.blocks) * stage // stages}" for stage in range(1, stages)]


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten().long())


def read(source: Path | None) -> tuple[Tensor, Tensor]:
    """Return bytes for training and for validation, split by file: every tenth file is for validation."""
    root = source or Path(sysconfig.get_paths()["stdlib"])
    found = [root] if root.is_file() else sorted(root.glob("*.py" if source is None else "**/*"))
    texts = [file.read_bytes() for file in found if file.is_file()]
    if len(texts) < 10:  # too few files: the last tenth of their text is for validation
        whole = b"".join(texts)
        texts = [whole[i * len(whole) // 10 : (i + 1) * len(whole) // 10] for i in range(10)]
    train = b"".join(text for i, text in enumerate(texts) if i % 10 != 9)
    validation = b"".join(texts[9::10])
    return torch.frombuffer(bytearray(train), dtype=torch.uint8), torch.frombuffer(
        bytearray(validation), dtype=torch.uint8
    )


def windows(text: Tensor, batch: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return windows at random places, and the same windows one byte later."""
    starts = torch.randint(len(text) - context, (batch, 1), generator=torch.Generator().manual_seed(seed))
    rows = text[starts + torch.arange(context + 1)]
    return rows[:, :-1], rows[:, 1:]


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Return the learning rate: a short warm-up, then a cosine down to a tenth."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


@contextmanager
def processes(ranks: int | None) -> Iterator[tuple[handlers.Handler, int, int, torch.device]]:
    """Return (handler, ranks, own rank, device): distributed under torchrun, else all ranks in this process."""
    if "RANK" not in os.environ:
        yield handlers.Local(), ranks or 2, 0, torch.device("cpu")
        return
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # before CUDA starts: a queue for every stream
    handler = handlers.auto("cuda" if torch.cuda.is_available() else "cpu")
    if isinstance(handler, handlers.Local):
        yield handler, ranks or 1, 0, torch.device("cpu")
        return
    if ranks not in (None, handler.size):
        fail(f"--ranks {ranks}, but torchrun started {handler.size} processes")
    try:
        yield handler, handler.size, handler.rank, handler.device
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # torchrun passes it on once more
        fail(f"rank {handler.rank}: interrupted")


def folder(logdir: Path, handler: handlers.Handler) -> Path:
    """Return a new folder for this run; rank 0 broadcasts its name."""
    name = [time.strftime("%Y%m%d-%H%M%S")]
    if isinstance(handler, handlers.Distributed):
        dist.broadcast_object_list(name, group=handler.group, group_src=0)
    return logdir / name[0]


def begin(saved: interop.Checkpoints | None, options: dict[str, Any], **sections: Any) -> interop.Run:
    """Return the run of the last checkpoint, or a new one. Raise if it had other options."""
    path = saved and saved.latest()
    if saved is None or path is None:
        return interop.resume(saved, **sections, options=options)
    try:
        before = saved.load(path, options=options)["options"]
        others = {name: value for name, value in before.items() if value != options[name]}
        if others:
            texts = [f"no --{name}" if value is None else f"--{name} {value}" for name, value in others.items()]
            fail(f"{path} is of a run with {' '.join(texts)}: go on with the same, or save to another folder")
        return interop.resume(saved, **sections, options=options)
    except interop.CheckpointError as error:
        fail(str(error))


def fail(message: str) -> NoReturn:
    console.print(message)
    raise typer.Exit(2)


class Report:
    """Show a progress bar on a terminal, else regular lines; only on the first rank."""

    def __init__(self, steps: int, silent: bool) -> None:
        self.steps, self.silent = steps, silent
        columns = (TextColumn("step {task.completed}/{task.total}"), BarColumn(), TextColumn("{task.description}"))
        self.bar = Progress(*columns, TimeRemainingColumn(), console=console, disable=silent or not console.is_terminal)
        self.task = self.bar.add_task("", total=steps)

    def __enter__(self) -> "Report":
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def show(self, step: int, loss: float, speed: float) -> None:
        text = f"loss {loss:.3f}  {speed:,.0f} tokens/s"
        self.bar.update(self.task, completed=step + 1, description=text)
        if not (self.silent or console.is_terminal or step % max(1, self.steps // 10)):
            console.print(f"step {step}/{self.steps}  {text}")


def main(
    ranks: Annotated[int | None, typer.Option(help="Ranks of the pipeline; under torchrun, its processes.")] = None,
    layers: Annotated[int, typer.Option(help="Transformer blocks.")] = 4,
    width: Annotated[int, typer.Option(help="Width of the model; heads are 32 wide.")] = 128,
    context: Annotated[int, typer.Option(help="Bytes in a window.")] = 64,
    batch: Annotated[int, typer.Option(help="Windows in a batch.")] = 32,
    microbatches: Annotated[int, typer.Option(help="Parts that a batch is split into.")] = 8,
    schedule: Annotated[str, typer.Option(help=" | ".join(SCHEDULES))] = "1f1b",
    stages: Annotated[
        int | None, typer.Option(help="Stages, on any number of ranks: the schedule is searched.", min=1)
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 400,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 3e-3,
    dropout: Annotated[float, typer.Option(help="Dropout rate.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Seed of parameters, data and dropout.")] = 0,
    text: Annotated[Path | None, typer.Option(help="A file or folder to train on instead.", exists=True)] = None,
    logdir: Annotated[Path, typer.Option(help="Where TensorBoard finds the run.")] = Path("runs/train_gpt"),
    every: Annotated[int, typer.Option(help="Steps from one captured timeline to the next.", min=1)] = 50,
    checkpoints: Annotated[Path | None, typer.Option(help="Where to save, and to go on from.")] = None,
    save_every: Annotated[int, typer.Option(help="Steps from one checkpoint to the next.", min=1)] = 100,
    until: Annotated[int | None, typer.Option(help="Save and stop at this step, to go on another time.")] = None,
) -> None:
    """Train a byte-level GPT in pipeline stages."""
    if width % 32:
        fail(f"--width {width} is no multiple of 32, the width of a head")
    if batch < microbatches:
        fail(f"--batch {batch} can't be split into {microbatches} microbatches: take as many at least")
    if schedule not in SCHEDULES:
        fail(f"there is no schedule {schedule!r}: take one of {', '.join(SCHEDULES)}")
    with processes(ranks) as (handler, ranks, rank, device), ExitStack() as stack:
        try:
            plan = schedules.CATALOGUE[schedule].plan(ranks, microbatches)
            order = schedules.CATALOGUE[schedule].schedule(plan)
        except fpipe.ScheduleError as error:
            fail(str(error))
        count = stages or plan.stages
        if layers < count:
            fail(f"--layers {layers} are too few for {count} stages: take as many at least")
        train, validation = (source.to(device) for source in read(text))
        if len(validation) <= context:
            fail(f"{len(validation)} bytes are left for validation: too few for a context of {context}")
        torch.manual_seed(seed)
        model = GPT(layers, width, context, dropout).to(device)
        example = torch.zeros(batch // microbatches, context, dtype=torch.uint8, device=device)
        pipeline, params = interop.split(model, at=cuts(model, count), example=example, loss=cross_entropy)
        if stages is not None:
            job = interop.elastic(pipeline, microbatches, handler=handler, ranks=ranks, folder=checkpoints)
            handler, plan, order = job.handler, job.plan, job.schedule
        evaluate = fpipe.evaluate(interop.eval_mode(pipeline), plan, handler=handler, loss=True)
        size = sum(p.numel() for tree in params.values() for p in tree.values())
        if isinstance(handler, handlers.Distributed):
            params = pipeline.params_on(params, plan, rank)
        adamw = interop.optimizer(torch.optim.AdamW, lr=lr, weight_decay=0.01)
        options = {"seed": seed, "steps": steps, "lr": lr, "dropout": dropout, "batch": batch, "width": width}
        options |= {"microbatches": microbatches, "layers": layers, "context": context, "text": text and str(text)}
        saved = checkpoints and interop.Checkpoints(checkpoints, pipeline, plan, handler=handler, keep=2)
        run = begin(saved, options, params=params, optimizer=adamw.init(params))
        recorder = stack.enter_context(Recorder(folder(logdir, handler), every, first=run.step, tokens=context))
        step = fpipe.value_and_grad(pipeline, order, plan, handler=handler, observe=recorder)

        def bits_per_byte() -> float:
            losses = [evaluate(run.params, *windows(validation, batch, context, i)).item() for i in range(8)]
            return sum(losses) / len(losses) / math.log(2)

        def show(message: str) -> None:
            if rank == 0:
                console.print(message, soft_wrap=True)

        show(f"{size:,} parameters in {plan.stages} stages on {plan.ranks} ranks; {len(train):,} bytes to train on")
        before = bits_per_byte()
        recorder.scalar("validation/bits_per_byte", before, run.step)
        end = min(steps, until or steps)
        with Report(steps, silent=rank > 0) as report:
            for i in run.steps(end, every=save_every):
                start = time.perf_counter()
                loss, grads = step(run.params, *windows(train, batch, context, seed * steps + i), rng=(seed, i))
                rate = learning_rate(i, steps, lr)
                run.params, run.optimizer = adamw.update(grads, run.optimizer, run.params, lr=rate)
                report.show(i, loss.item(), batch * context / (time.perf_counter() - start))
        after = bits_per_byte()
        recorder.scalar("validation/bits_per_byte", after, end)
        show(f"validation: {before:.2f} bits per byte before, {after:.2f} after {end} steps")
        tensorboard = Path(sys.executable).with_name("tensorboard")
        show(f"to see the timelines (tab Pipeline) and curves: {tensorboard} --logdir {logdir}")


if __name__ == "__main__":
    typer.run(main)
