"""LBFGS, whose step calls a closure several times: forward and backward passes run inside the optimizer step.

Must: exit with 0. Backward passes inside the closure belong to the step that is open, which is one call of `step`.
"""

import torch

model = torch.nn.Linear(16, 1)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
x, y = torch.randn(64, 16), torch.randn(64, 1)


def closure():
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    return loss


for _ in range(40):
    optimizer.step(closure)
print("done")
