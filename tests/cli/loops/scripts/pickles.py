"""Saves whole objects while it trains: model, optimizer, a deep copy, and an object of a class in `__main__`.

Must: exit with 0 and print `loaded`. What is saved during the recorded steps has no reference to stepscope, so that
it loads without it, and the class is found as `__main__.Config`.
"""

import copy
import io
import pickle

import torch


class Config:
    def __init__(self, lr):
        self.lr = lr


config = Config(0.01)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)
for _ in range(40):
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    saved = io.BytesIO()
    torch.save({"model": model, "optimizer": optimizer, "config": config}, saved)
    assert b"stepscope" not in saved.getvalue()
    copy.deepcopy(model)(torch.randn(8, 16))
    copy.deepcopy(optimizer)
saved.seek(0)
assert torch.load(saved, weights_only=False)["config"].lr == 0.01
assert pickle.loads(pickle.dumps(config)).lr == 0.01
print("loaded")
