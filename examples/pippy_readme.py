"""Split the network of PiPPy's README into three stages: blocks of Linear and ReLU, and a projection.

    python examples/pippy_readme.py                                        all ranks in this process
    torchrun --standalone --nproc-per-node 3 examples/pippy_readme.py      one rank in each process, over gloo

As in PiPPy, the stages end after layer0 and layer1, which `at` names. The module is not changed.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fpipe
from fpipe import Placement, handlers, interop

BATCH, MICROBATCHES, STEPS = 32, 4, 5


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.lin, self.relu = nn.Linear(inputs, outputs), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.lin(x))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer0, self.layer1, self.layer2 = Block(512, 512), Block(512, 1024), Block(1024, 256)
        self.output_proj = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.output_proj(self.layer2(self.layer1(self.layer0(x))))


def main() -> None:
    handler = handlers.auto()
    torch.manual_seed(0)
    network = Network()
    x, target = torch.randn(BATCH, 512), torch.randint(10, (BATCH,))
    expected = network(x).detach()

    cuts = [interop.End("layer0"), interop.End("layer1")]
    pipeline, params = interop.split(network, at=cuts, example=(x,), loss=F.cross_entropy)
    plan = pipeline.plan(Placement.loop(3), MICROBATCHES)
    params = pipeline.params_on(params, plan, handler)
    forward = fpipe.evaluate(pipeline, plan, handler=handler, gather=True)
    torch.testing.assert_close(forward(params, x), expected)

    step = fpipe.value_and_grad(pipeline, "1f1b", plan, handler=handler)
    sgd = interop.optimizer(torch.optim.SGD, lr=0.1)
    optimizer = sgd.init(params)
    for i in range(STEPS):
        loss, grads = step(params, x, target)
        params, optimizer = sgd.update(grads, optimizer, params)
        if handler.is_first:
            print(f"step {i}: loss {loss:.4f}")
    if handler.is_first:
        print("the outputs were the network's")


if __name__ == "__main__":
    main()
