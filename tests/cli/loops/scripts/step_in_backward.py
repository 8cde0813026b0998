"""Each parameter has its own optimizer, which steps inside the backward pass as soon as the gradient is ready.

Must: exit with 0. A step is one backward pass with its four optimizer steps, not a quarter of it.
"""

import torch

model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizers = {parameter: torch.optim.SGD([parameter], lr=0.01) for parameter in model.parameters()}


def update(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(update)
for _ in range(40):
    model(torch.randn(8, 16)).square().mean().backward()
print("done")
