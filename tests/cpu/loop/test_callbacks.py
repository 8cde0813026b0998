"""Callbacks and loops of the real libraries, with tiny models."""

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader, Dataset

import stepscope
from stepscope.integrations import LightningCallback, TransformersCallback
from tests.cpu.loop.loops import SHORT, make_loader, no_page, read_handover, read_trace

__all__ = ["no_page"]  # a fixture
STEPS = 24


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Libraries warn about what a test does on purpose: few workers, no checkpoints, no accelerator."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        yield


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(index, index + 8) % 16
        return {"input_ids": tokens, "labels": tokens}


def hooks() -> list[Any]:
    return [*optimizers._global_optimizer_pre_hooks, *optimizers._global_optimizer_post_hooks]


def train_transformers(folder: Path, callback: TransformersCallback, **settings: Any) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    config = GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=2,
        max_steps=STEPS,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=5,
        disable_tqdm=True,
        **settings,
    )
    model = GPT2LMHeadModel(config)  # type: ignore[no-untyped-call]
    Trainer(model=model, args=arguments, train_dataset=Tokens(), callbacks=[callback]).train()


@pytest.mark.usefixtures("no_page")
def test_a_trainer_of_transformers_is_recorded(tmp_path: Path) -> None:
    callback = TransformersCallback(tmp_path / "run", **SHORT)
    train_transformers(tmp_path, callback, gradient_accumulation_steps=2)
    run = read_handover(tmp_path / "run")
    assert (run.recorded_steps, run.model) == (2, "GPT2LMHeadModel")
    assert run.facts.backwards_per_step == pytest.approx(2, abs=0.2)
    assert run.facts.optimizers == ("AdamW",)
    assert run.facts.loaders[0].dataset == "Tokens"
    names = set(read_trace(tmp_path / "run").ranges["name"])
    assert {"module:transformer.h.0.attn", "phase:clipping", "phase:backward", "phase:input"} <= names
    assert any(line.startswith("transformers/") for line in run.sources.lines)
    assert hooks() == []


class Regression:
    """The Lightning module, made when Lightning is imported."""

    @staticmethod
    def make(*, fails_in: int | None = None) -> Any:
        from lightning.pytorch import LightningModule

        class Module(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(4, 1)

            def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
                if batch_idx == fails_in:
                    raise RuntimeError("broken")
                loss: torch.Tensor = self.layer(batch[0]).square().mean()
                return loss

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.SGD(self.parameters(), lr=0.01)

        return Module()


def train_lightning(folder: Path, callback: LightningCallback, module: Any, **settings: Any) -> None:
    from lightning.pytorch import Trainer

    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        **settings,
    )
    trainer.fit(module, make_loader(batches=4 * STEPS))


@pytest.mark.usefixtures("no_page")
def test_a_trainer_of_lightning_is_recorded(tmp_path: Path) -> None:
    callback = LightningCallback(tmp_path / "run", **SHORT)
    train_lightning(tmp_path, callback, Regression.make(), accumulate_grad_batches=2)
    run = read_handover(tmp_path / "run")
    assert run.recorded_steps == 2
    assert run.facts.backwards_per_step == pytest.approx(2, abs=0.2)
    assert run.facts.optimizers == ("SGD",)
    names = set(read_trace(tmp_path / "run").ranges["name"])
    assert {"module:layer", "phase:backward", "phase:input"} <= names
    assert hooks() == []


@pytest.mark.usefixtures("no_page")
def test_a_failure_in_lightning_ends_the_recording(tmp_path: Path) -> None:
    callback = LightningCallback(tmp_path / "run", **SHORT)
    with pytest.raises(RuntimeError, match="broken"):
        train_lightning(tmp_path, callback, Regression.make(fails_in=STEPS - 2))
    assert read_handover(tmp_path / "run").recorded_steps == 2
    assert hooks() == []


@pytest.mark.usefixtures("no_page")
def test_a_loop_of_accelerate_is_recorded(tmp_path: Path) -> None:
    from accelerate import Accelerator  # type: ignore[import-untyped]

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    loader: DataLoader[Any] = make_loader(batches=2 * STEPS)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with stepscope.record(tmp_path / "run", **SHORT):
        for (batch,) in loader:
            with accelerator.accumulate(model):
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    run = read_handover(tmp_path / "run")
    assert run.recorded_steps == 2
    assert run.facts.found_by == "optimizer steps"
    assert run.facts.backwards_per_step == pytest.approx(2, abs=0.2)
    assert len(run.facts.optimizers) == 1
    assert hooks() == []
