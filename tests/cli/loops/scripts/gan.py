"""Two optimizers that take turns in each step, as a GAN has.

Must: exit with 0. A step is one iteration, with a step of each optimizer and two backward passes: not half of it.
Both optimizers are in `LoopFacts.optimizers`.
"""

import torch

generator = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
critic = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3)
critic_optimizer = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
for _ in range(40):
    real, noise = torch.randn(8, 16), torch.randn(8, 8)
    critic_optimizer.zero_grad()
    loss = critic(generator(noise).detach()).mean() - critic(real).mean()
    loss.backward()
    critic_optimizer.step()

    generator_optimizer.zero_grad()
    loss = -critic(generator(noise)).mean()
    loss.backward()
    generator_optimizer.step()
print("done")
