"""Your own model and loop, in one process or in several.

python examples/own_model.py                              # all stages in this process
torchrun --nproc-per-node 3 examples/own_model.py         # one process per stage, the same results
"""

from __future__ import annotations

import torch
from torch import nn

import offbeat
from offbeat import data

torch.set_num_threads(1)
torch.manual_seed(0)

model = nn.Sequential(
    nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
    nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
    nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
    nn.Sequential(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
    nn.Sequential(nn.Flatten(), nn.Linear(512, 10)),
)
digits = data.open("digits")

pipe = offbeat.Pipeline(
    model,
    K=3,
    method=offbeat.ADL(M=2),
    loss=nn.functional.cross_entropy,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
)
for epoch in range(3):
    for x, y in digits.train(batch_size=32, seed=0, epoch=epoch):
        loss = pipe.step(x, y)
    result = pipe.evaluate(digits.test(batch_size=100))  # no need to drain first
    if pipe.last:
        print(f"epoch {epoch}: loss of the last batch {loss:.3f}, test error {result['error']:.2f}%")
pipe.drain()
if pipe.last:
    print("staleness per stage:", [stage.mean for stage in pipe.staleness])
    print("sum of all weights:", sum(parameter.sum().item() for parameter in pipe.model.parameters()))
pipe.close()
