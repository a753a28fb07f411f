"""A whole training loop: a convnet on scikit-learn's handwritten digits, in two stages on two ranks.

torchrun --standalone --nproc-per-node 2 examples/training_loop.py     run it again, and it goes on
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

STEPS, BATCH, PARTS, FOLDER = 60, 128, 2, "runs/training_loop"


def rate(i: int, peak: float = 3e-3, warmup: int = 10) -> float:
    return peak * min((i + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * max(0, i - warmup) / (STEPS - warmup)))


torch.manual_seed(0)
digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
x, y, test_x, test_y = *(each[360:] for each in (images, labels)), *(each[:360] for each in (images, labels))
front = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
back = nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10))
pipeline, params = interop.from_modules([front, back], loss=F.cross_entropy)
handler = handlers.auto()
plan = pipeline.plan(Placement.loop(ranks=2), microbatches=4)
adamw = interop.optimizer(torch.optim.AdamW)
params = pipeline.params_on(params, plan, handler)
state = {"params": params, "optimizer": adamw.init(params), "step": 0}
checkpoints = interop.Checkpoints(f"{FOLDER}/checkpoints", pipeline, plan, handler=handler, keep=2)
state = checkpoints.load(**state) if checkpoints.latest() else state
params, optimizer, start = state.values()
predict = fpipe.evaluate(pipeline, plan, handler=handler, gather=True)
with Recorder(FOLDER, first=start * PARTS) as recorder:
    step = fpipe.value_and_grad(pipeline, "1f1b", plan, handler=handler, observe=recorder)
    for i in range(start, STEPS):
        total = optree.tree_map(torch.zeros_like, params)
        for rows in interop.rows(len(y), replica=0, replicas=1, batch=BATCH, step=i, seed=0).chunk(PARTS):
            loss, grads = step(params, x[rows], y[rows])
            total = optree.tree_map(lambda a, b: a + b / PARTS, total, grads)
        total, norm = fpipe.clip_by_global_norm(total, 1.0, plan, handler=handler)
        params, optimizer = adamw.update(total, optimizer, params, lr=rate(i))
        if i % 20 == 19:
            checkpoints.save(params=params, optimizer=optimizer, step=i + 1)
            right = predict(params, test_x).argmax(1) == test_y
            print(f"step {i + 1}: loss {loss:.3f}, test accuracy {right.double().mean():.1%}" * handler.is_first)
