"""Looks for hooks and patches at the end, after 60 steps. Usage: hooks_left.py

Must: exit with 0 and print `clean`: what PyTorch offers is what it was before the script began, as `python
hooks_left.py` shows.
"""

import torch
from torch.optim import optimizer as optimizers
from torch.utils import data

model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(60):
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
left = [
    *optimizers._global_optimizer_pre_hooks,
    *optimizers._global_optimizer_post_hooks,
    *torch.nn.modules.module._global_forward_hooks,
    *torch.nn.modules.module._global_forward_pre_hooks,
    *optimizer._optimizer_step_pre_hooks,
    *optimizer._optimizer_step_post_hooks,
    *(hook for module in model.modules() for hook in (*module._forward_hooks, *module._forward_pre_hooks)),
    *(name for module in model.modules() for name in ("forward", "__call__") if name in vars(module)),
]
patched = {
    "backward": torch.Tensor.backward.__module__ != "torch._tensor",
    "autograd": torch.autograd.backward.__module__ != "torch.autograd",
    "step": not type(optimizer).step.__module__.startswith("torch."),
    "loader": data.DataLoader.__iter__.__module__ != "torch.utils.data.dataloader",
    "save": torch.save.__module__ != "torch.serialization",
    "clip": torch.nn.utils.clip_grad_norm_.__module__ != "torch.nn.utils.clip_grad",
}
still = [name for name, is_patched in patched.items() if is_patched]
print("clean" if not left and not still else f"left behind: {left} {still}")
