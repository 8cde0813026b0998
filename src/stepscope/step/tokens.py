"""The training data: the batch of each step.

A batch depends only on the seed and the step number. So a run that resumes, even on another number of ranks, sees the
same data as an uninterrupted one.
"""

import hashlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stepscope.errors import StepscopeError
from stepscope.spec import ModelShape, Training

# B sequences, C context
_FOLLOWS = 0.9  # how often a synthetic token follows from the previous one


class Tokens:
    """Sequences of context + 1 tokens: the inputs, and the targets shifted by one."""

    def __init__(self, training: Training) -> None:
        assert isinstance(training.workload.model, ModelShape)
        self._vocab = training.workload.model.vocab
        self._batch, self._context = training.workload.batch, training.workload.context
        self._seed = training.workload.seed
        self._text = _open_text(Path(training.data), self._context) if training.data else None
        # Which token follows which. Purely random tokens cannot be learned, and a loss that does not fall shows
        # nothing.
        self._next_V = torch.randperm(self._vocab, generator=torch.Generator().manual_seed(self._seed))

    def batch(self, step: int) -> Tensor:
        """The global batch of a step, in CPU memory. Each rank takes its share of the sequences."""
        generator = torch.Generator().manual_seed(_mix(self._seed, step))
        if self._text is None:
            return self._make(generator)
        starts_B = torch.randint(len(self._text) - self._context, (self._batch,), generator=generator)
        windows = [self._text[start : start + self._context + 1] for start in starts_B.tolist()]
        return torch.from_numpy(np.stack(windows).astype(np.int64))

    def _make(self, generator: torch.Generator) -> Tensor:
        shape = (self._batch, self._context + 1)
        noise_BC = torch.randint(self._vocab, shape, generator=generator)
        follows_BC = torch.rand(shape, generator=generator) < _FOLLOWS
        columns = [noise_BC[:, 0]]
        for place in range(1, self._context + 1):
            columns.append(torch.where(follows_BC[:, place], self._next_V[columns[-1]], noise_BC[:, place]))
        return torch.stack(columns, dim=1)


def _open_text(path: Path, context: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    size = path.stat().st_size
    text = np.memmap(path, dtype=np.uint8, mode="r") if size else np.empty(0, np.uint8)
    if size < context + 1:
        raise StepscopeError(
            f"`{path}` is too short: it has {size} bytes, and a sequence needs {context + 1}",
            detail="each sequence is a window at a random position in the file",
            hint=f"use a longer file, or --context {max(size - 1, 1)}",
        )
    return text


def _mix(seed: int, step: int) -> int:
    digest = hashlib.sha256(f"{seed} {step}".encode()).digest()
    return int.from_bytes(digest[:7], "little")
