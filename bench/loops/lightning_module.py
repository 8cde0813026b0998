"""Train a Transformer language model as a Lightning module.

    python lightning_module.py
    python lightning_module.py --d-model 768 --num-layers 12 --num-heads 12 --context 512 --batch-size 16 \
        --precision bf16-mixed --max-steps 200          # on a GPU, which Lightning uses if there is one
"""

import argparse
import tempfile

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class RandomText(L.LightningDataModule):
    def __init__(self, vocab: int, context: int, batch_size: int, num_sequences: int, num_workers: int) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        # Each sequence counts upwards from a random token, with some noise.
        shape = (self.hparams["num_sequences"], self.hparams["context"] + 1)
        start = torch.randint(self.hparams["vocab"], (shape[0], 1), generator=generator)
        noise = torch.randint(2, shape, generator=generator)
        tokens = (start + torch.arange(shape[1]) + noise) % self.hparams["vocab"]
        split = shape[0] * 9 // 10
        self.train_set, self.val_set = TensorDataset(tokens[:split]), TensorDataset(tokens[split:])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(
            self.train_set,
            batch_size=self.hparams["batch_size"],
            shuffle=True,
            drop_last=True,
            num_workers=self.hparams["num_workers"],
            persistent_workers=self.hparams["num_workers"] > 0,
        )

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.val_set, batch_size=self.hparams["batch_size"])


class LanguageModel(L.LightningModule):
    def __init__(
        self, vocab: int, context: int, d_model: int, num_layers: int, num_heads: int, learning_rate: float = 3e-4
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(vocab, d_model)
        self.position = nn.Parameter(torch.zeros(context, d_model))
        layer = nn.TransformerEncoderLayer(
            d_model, num_heads, 4 * d_model, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(d_model, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        hidden = self.encoder(self.embed(tokens) + self.position[:length], mask=mask, is_causal=True)
        logits: Tensor = self.head(hidden)
        return logits

    def _loss(self, batch: tuple[Tensor]) -> Tensor:
        (tokens,) = batch
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"], weight_decay=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, T_max=int(self.trainer.estimated_stepping_batches)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=1000)
    parser.add_argument("--context", type=int, default=96)
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--num-sequences", type=int, default=400)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--max-steps", type=int, default=60)
    parser.add_argument("--accumulate-grad-batches", type=int, default=1)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--root", default=None, help="directory of logs and checkpoints")
    args = parser.parse_args()

    L.seed_everything(7, workers=True)
    root = args.root or tempfile.mkdtemp(prefix="lightning-")
    data = RandomText(args.vocab, args.context, args.batch_size, args.num_sequences, args.num_workers)
    model = LanguageModel(args.vocab, args.context, args.d_model, args.num_layers, args.num_heads)
    trainer = L.Trainer(
        accelerator=args.device,
        devices=1,
        max_steps=args.max_steps,
        precision=args.precision,
        accumulate_grad_batches=args.accumulate_grad_batches,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        default_root_dir=root,
        logger=CSVLogger(root),
        callbacks=[LearningRateMonitor(logging_interval="step"), ModelCheckpoint(monitor="val_loss")],
    )
    trainer.fit(model, datamodule=data)
    print({name: round(float(value), 4) for name, value in trainer.callback_metrics.items()})


if __name__ == "__main__":
    main()
