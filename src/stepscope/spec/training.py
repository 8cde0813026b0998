"""A `Training`: a workload stepped many times, by one rank or several."""

import math
from typing import get_args

import msgspec

from stepscope.spec.settings import SpecError, Strategy, require_choice, require_positive
from stepscope.spec.workload import ModelShape, Workload


class Training(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is trained on what, and by whom. The batch is that of all ranks together, so that another number of ranks
    trains the same model."""

    workload: Workload
    ranks: int = 1
    strategy: Strategy = "single"
    bucket_mb: float = 25.0
    shard_optimizer: bool = False
    steps: int = 100
    learning_rate: float = 1e-3
    warmup_steps: int = 0
    accumulate: int = 1  # an earlier name of the workload's `grad_accumulation`, which earlier runs have
    data: str = ""  # a text file, read as bytes; without one, tokens made from the seed
    save_every: int = 50

    def __post_init__(self) -> None:
        require_choice("strategy", self.strategy, get_args(Strategy))
        for name in ("ranks", "steps", "accumulate", "save_every"):
            require_positive(name, getattr(self, name))
        if self.warmup_steps < 0:
            raise SpecError(f"warmup_steps `{self.warmup_steps}` is negative", hint="--lr-warmup 0")
        for name, flag in (("bucket_mb", "--bucket-mb 25"), ("learning_rate", "--lr 0.001")):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise SpecError(f"{name} `{value:g}` is not positive", detail="expected more than 0", hint=flag)
        self._check_workload()
        self._check_strategy()
        workload = msgspec.structs.replace(self.workload, grad_accumulation=self.passes)
        msgspec.structs.force_setattr(self, "workload", workload)
        msgspec.structs.force_setattr(self, "accumulate", self.passes)

    def _check_workload(self) -> None:
        workload = self.workload
        if not isinstance(workload.model, ModelShape):
            raise SpecError(
                f"`{workload.model.name}` cannot be trained by this verb",
                detail="it trains the built-in model; a model of your own is wrapped in your own loop",
                hint="stepscope.parallel.DDP(model), stepscope.parallel.FSDP(model)",
            )
        if workload.mode != "train":
            raise SpecError(f"mode `{workload.mode}` does not train", hint="--mode train")
        if workload.precision == "fp16":
            raise SpecError(
                "precision `fp16` is not trained here",
                detail="its loss scale would have to be agreed on by all ranks; bf16 needs none",
                hint="--precision bf16",
            )
        if self.data and workload.model.vocab < 256:
            raise SpecError(
                f"vocab `{workload.model.vocab}` is too small for a file of bytes",
                detail="a byte is one of 256 tokens",
                hint="--vocab 256",
            )
        if 1 not in (self.accumulate, workload.passes) and self.accumulate != workload.passes:
            raise SpecError(
                f"accumulate `{self.accumulate}` and grad_accumulation `{workload.passes}`",
                detail="these are two names of one setting",
                hint=f"--grad-accumulation {workload.passes}",
            )
        share = self.ranks * self.passes
        if workload.batch % share:
            parts = f"{self.ranks} ranks" + (f" of {self.passes} passes each" if self.passes > 1 else "")
            raise SpecError(
                f"batch `{workload.batch}` cannot be shared out to {parts}",
                detail="every rank takes an equal part of the sequences",
                hint=f"--batch {math.ceil(workload.batch / share) * share}",
            )

    def _check_strategy(self) -> None:
        if self.strategy == "single" and self.ranks > 1:
            raise SpecError(
                f"strategy `single` with `{self.ranks}` ranks", detail="one process alone", hint="--strategy bucketed"
            )
        if self.shard_optimizer and self.strategy in ("single", "fsdp"):
            raise SpecError(
                f"a sharded optimizer with strategy `{self.strategy}`",
                detail="there is one rank alone" if self.strategy == "single" else "fsdp shards its state already",
                hint="--strategy bucketed --shard-optimizer",
            )
        if self.strategy == "fsdp" and self.workload.compile:
            raise SpecError(
                "compile with strategy `fsdp`",
                detail="its weights come and go while the model runs, which compiled code does not know",
                hint="--strategy bucketed",
            )

    @property
    def way(self) -> str:
        """The strategy, in a word or two."""
        return self.strategy + ("+sharded optimizer" if self.shard_optimizer else "")

    @property
    def passes(self) -> int:
        """Passes of a rank that make one step."""
        return max(self.accumulate, self.workload.passes)

    @property
    def identity(self) -> "Training":
        """What a run must keep to be the same run: how many ranks do it, in which way, for how long, is left out. So is
        where its text lies: what the text is, a digest says beside this."""
        workload = msgspec.structs.replace(self.workload, device="auto", grad_accumulation=1)
        return msgspec.structs.replace(
            self,
            workload=workload,
            ranks=1,
            strategy="single",
            bucket_mb=25.0,
            shard_optimizer=False,
            accumulate=1,
            steps=1,
            data="",
            save_every=1,
        )
