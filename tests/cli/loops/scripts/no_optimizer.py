"""Updates its parameters by hand, without torch.optim.

Must: exit with 0. A message that says that 40 backward passes and no optimizer step were seen, and names
`stepscope.record`.
"""

import torch

model = torch.nn.Linear(16, 1)
for _ in range(40):
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
            parameter.grad = None
print("done")
