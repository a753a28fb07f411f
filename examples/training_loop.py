"""A whole training loop: a convnet on scikit-learn's handwritten digits, in two stages on two ranks.

torchrun --standalone --nproc-per-node 2 examples/training_loop.py     run again, it goes on where it stopped
"""

import math

import optree
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import fpipe
from fpipe import Placement, handlers, interop
from fpipe.tensorboard import Recorder

STEPS, EVERY, BATCH, PARTS, FOLDER = 60, 20, 128, 2, "runs/training_loop"
torch.manual_seed(0)
digits = load_digits()
images, labels = torch.tensor(digits.data / 16, dtype=torch.bfloat16), torch.tensor(digits.target)
x, y, test_x, test_y = images[360:], labels[360:], images[:360], labels[:360]

front = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
back = nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10))
pipeline, params = interop.from_modules([front, back], loss=lambda scores, y: F.cross_entropy(scores.float(), y))
plan, handler = pipeline.plan(Placement.loop(ranks=2), microbatches=4), handlers.auto()
params = pipeline.params_on(params, plan, handler)
adamw = interop.optimizer(torch.optim.AdamW)
checkpoints = interop.Checkpoints(f"{FOLDER}/checkpoints", pipeline, plan, handler=handler, keep=2)
run = interop.resume(checkpoints, params=params, optimizer=adamw.init(params))

bf16 = {"handler": handler, "precision": fpipe.Precision(compute=torch.bfloat16)}
predict = fpipe.evaluate(pipeline, plan, gather=True, **bf16)
with Recorder(FOLDER, first=run.step * PARTS) as recorder:
    step = fpipe.value_and_grad(pipeline, "1f1b", plan, observe=recorder, **bf16)
    for i in run.steps(STEPS, every=EVERY):
        grads = optree.tree_map(torch.zeros_like, run.params)
        for rows in interop.rows(len(y), replica=0, replicas=1, batch=BATCH, step=i, seed=0).chunk(PARTS):
            loss, part = step(run.params, x[rows], y[rows])
            grads = optree.tree_map(lambda a, b: a + b / PARTS, grads, part)
        grads, norm = fpipe.clip_by_global_norm(grads, 1.0, plan, handler=handler)
        rate = 3e-3 * min((i + 1) / 10, 0.5 + 0.5 * math.cos(math.pi * i / STEPS))
        run.params, run.optimizer = adamw.update(grads, run.optimizer, run.params, lr=rate)
        if (i + 1) % EVERY == 0:
            accuracy = (predict(run.params, test_x).argmax(1) == test_y).double().mean()
            if handler.is_first:
                print(f"step {i + 1}: loss {loss:.3f}, accuracy {accuracy:.1%}")
