"""`Training`: a workload that runs for many steps on one or more ranks."""

import math
from typing import get_args

import msgspec

from stepscope.spec.settings import SpecError, Strategy, flag_of, require_choice, require_positive
from stepscope.spec.workload import WHOLE_STEP, ModelShape, Workload


class Training(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A training run: the workload, the ranks and the data. The batch is the global batch, so the number of ranks does
    not change the training."""

    workload: Workload
    ranks: int = 1
    strategy: Strategy = "single"
    bucket_mb: float = 25.0
    shard_optimizer: bool = False
    steps: int = 100
    learning_rate: float = 1e-3
    warmup_steps: int = 0
    accumulate: int = 1  # former name of the workload's `grad_accumulation`, still in old runs
    data: str = ""  # a text file, read as bytes; if empty, synthetic tokens from the seed
    save_every: int = 50

    def __post_init__(self) -> None:
        require_choice("strategy", self.strategy, get_args(Strategy))
        for name in ("ranks", "steps", "accumulate", "save_every"):
            require_positive(name, getattr(self, name))
        if self.warmup_steps < 0:
            raise SpecError(f"warmup_steps must be at least 0, got `{self.warmup_steps}`", hint="--lr-warmup 0")
        for name, flag in (("bucket_mb", "--bucket-mb 25"), ("learning_rate", "--lr 0.001")):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise SpecError(f"{name} must be above 0, got `{value:g}`", hint=flag)
        self._check_workload()
        self._check_strategy()
        workload = msgspec.structs.replace(self.workload, grad_accumulation=self.passes)
        msgspec.structs.force_setattr(self, "workload", workload)
        msgspec.structs.force_setattr(self, "accumulate", self.passes)

    def _check_workload(self) -> None:
        workload = self.workload
        if not isinstance(workload.model, ModelShape):
            raise SpecError(
                f"`{workload.model.name}` cannot be trained with `stepscope train`",
                detail="it trains only the built-in model; for your own, use the wrappers in your training loop",
                hint="stepscope.parallel.DDP(model), stepscope.parallel.FSDP(model)",
            )
        if workload.mode != "train":
            raise SpecError(f"training requires mode `train`, got `{workload.mode}`", hint="--mode train")
        if workload.precision == "fp16":
            raise SpecError(
                "precision `fp16` is unsupported for training",
                detail="all ranks would have to agree on a loss scale; bf16 needs none",
                hint="--precision bf16",
            )
        if self.data and workload.model.vocab < 256:
            raise SpecError(
                f"vocab `{workload.model.vocab}` is too small for a text file",
                detail="a file is read as bytes, which are 256 different tokens",
                hint="--vocab 256",
            )
        if 1 not in (self.accumulate, workload.passes) and self.accumulate != workload.passes:
            raise SpecError(
                f"accumulate `{self.accumulate}` conflicts with grad_accumulation `{workload.passes}`",
                detail="accumulate is the former name of grad_accumulation",
                hint=f"--grad-accumulation {workload.passes}",
            )
        share = self.ranks * self.passes
        if workload.batch % share:
            parts = f"{self.ranks} rank{'s' * (self.ranks != 1)}"
            parts += f" with {self.passes} micro-batches each" if self.passes > 1 else ""
            raise SpecError(
                f"batch `{workload.batch}` cannot be split evenly over {parts}",
                detail=f"expected a multiple of {share}",
                hint=f"--batch {math.ceil(workload.batch / share) * share}",
            )

    def _check_strategy(self) -> None:
        asked = [name for name in WHOLE_STEP if getattr(self.workload, name)]
        if asked and self.strategy != "single":
            raise SpecError(
                f"{asked[0]} cannot be used with strategy `{self.strategy}`",
                detail="it changes a step as a whole, between whose parts this strategy communicates",
                hint=f"{flag_of(asked[0])} no, or --strategy single",
            )
        if self.strategy == "single" and self.ranks > 1:
            raise SpecError(
                f"strategy `single` cannot be used with `{self.ranks}` ranks",
                detail="it runs in one process",
                hint="--strategy bucketed",
            )
        if self.shard_optimizer and self.strategy in ("single", "fsdp"):
            raise SpecError(
                f"a sharded optimizer cannot be used with strategy `{self.strategy}`",
                detail="there is only one rank" if self.strategy == "single" else "fsdp already shards its state",
                hint="--strategy bucketed --shard-optimizer",
            )
        if self.strategy == "fsdp" and self.workload.compile:
            raise SpecError(
                "compile cannot be used with strategy `fsdp`",
                detail="fsdp gathers and frees weights while the model runs, which compiled code cannot handle",
                hint="--strategy bucketed",
            )

    @property
    def way(self) -> str:
        """The strategy in a word or two."""
        return self.strategy + ("+sharded optimizer" if self.shard_optimizer else "")

    @property
    def passes(self) -> int:
        """Forward and backward passes of a rank per step."""
        return max(self.accumulate, self.workload.passes)

    @property
    def identity(self) -> "Training":
        """The settings that a resumed run must not change. The number of ranks, the strategy and the number of steps
        may change, and so may the path of the text, whose content is checked by a digest."""
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
