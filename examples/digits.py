"""Train a convnet with batch norm on scikit-learn's handwritten digits, in three stages on three ranks.

    python examples/digits.py                                              all ranks in this process
    torchrun --standalone --nproc-per-node 3 examples/digits.py            one rank in each process, over gloo

Each stage's running statistics are its state: an argument and a result of every step. The two print the same if both
have the same number of threads: torchrun sets OMP_NUM_THREADS=1, which a single process needs as well.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fpipe
from fpipe import Placement, handlers, interop

STAGES, MICROBATCHES, BATCH = 3, 4, 128


def convnet() -> list[nn.Module]:
    """A convnet in three stages: 8 x 8 images to ten classes."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]

    head = [nn.Flatten(), nn.Linear(64 * 16, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)]
    return [nn.Sequential(*block(1, 32)), nn.Sequential(*block(32, 64), nn.MaxPool2d(2)), nn.Sequential(*head)]


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images and labels for training and for testing: every fifth is for the test."""
    dataset = load_digits()
    images = torch.tensor(dataset.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(dataset.target)
    test = torch.arange(len(labels)) % 5 == 0
    return images[~test], labels[~test], images[test], labels[test]


def main(epochs: int) -> None:
    handler = handlers.auto()
    torch.manual_seed(0)
    modules = convnet()
    pipeline, params = interop.from_modules(modules, loss=F.cross_entropy)
    plan = pipeline.plan(Placement.loop(STAGES), MICROBATCHES)
    state = interop.buffers(modules)
    params, state = pipeline.params_on(params, plan, handler), pipeline.state_on(state, plan, handler)

    step = fpipe.value_and_grad(pipeline, "1f1b", plan, handler=handler)
    predict = fpipe.evaluate(interop.eval_mode(pipeline), plan, handler=handler, gather=True)
    adamw = interop.optimizer(torch.optim.AdamW, lr=2e-3)
    optimizer = adamw.init(params)
    images, labels, test_images, test_labels = digits()
    for epoch in range(epochs):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        for i, rows in enumerate(order.split(BATCH)[:-1]):  # batch norm wants no microbatch of few rows
            loss, grads, state = step(params, images[rows], labels[rows], state=state, rng=(epoch, i))
            params, optimizer = adamw.update(grads, optimizer, params)
        right = predict(params, test_images, state=state).argmax(1) == test_labels
        if handler.is_first:
            print(f"epoch {epoch}: loss {loss:.3f}, test accuracy {right.double().mean():.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    main(parser.parse_args().epochs)
