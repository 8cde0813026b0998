"""Ends with sys.exit(3) inside the loop, in step 30. Usage: exits.py [STEP]

Must: exit with 3. The page if the steps were recorded by then, and no traceback.
"""

import sys

import torch

model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(40):
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == int(sys.argv[1] if len(sys.argv) > 1 else 30):
        sys.exit(3)
