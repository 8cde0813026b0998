"""A DataLoader whose workers are spawned: they import this file again, under the name `__mp_main__`.

Must: exit with 0 and print `40 batches` once. The workers find `Numbers` and are not recorded. No "bootstrapping
phase" error, and no second recording.
"""

import torch
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, index):
        return torch.full((16,), float(index)) / 160


def main():
    loader = DataLoader(Numbers(), batch_size=4, num_workers=1, multiprocessing_context="spawn")
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    count = 0
    for batch in loader:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        count += 1
    print(count, "batches")


if __name__ == "__main__":
    main()
