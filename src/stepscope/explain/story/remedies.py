"""What to copy for each finding: for a run of ours the whole command with the flag that mends it, and for anybody's own
code the lines to paste.

`stepscope rule CODE` explains; here is only what to type. A command is given where a setting of the workload mends the
finding and is not set already: a flag that changes nothing is no remedy.
"""

import math
import shlex
from collections.abc import Callable
from typing import get_args

import msgspec

from stepscope.explain.story.commands import write_command
from stepscope.explain.trace.profile import Profile
from stepscope.findings import Advice, Copyable, Finding
from stepscope.spec import ModelShape, Optimizer, Workload

_PYTHON = {
    "SS001": 'model = torch.compile(model, mode="reduce-overhead")  # CUDA graphs; shapes must not change',
    "SS002": (
        "total_loss += loss.detach()  # not loss.item(): ask for the number once in a hundred steps\n"
        "x = torch.where(mask, x, 0.0)  # not x[mask], whose size only the GPU knows"
    ),
    "SS003": "model = torch.compile(model)",
    "SS004": (
        "out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # False: nothing is masked"
    ),
    "SS005": (
        'torch.set_float32_matmul_precision("high")  # TF32\n'
        'with torch.autocast("cuda", torch.bfloat16):  # or bf16\n'
        "    loss = model(x)"
    ),
    "SS006": "model = torch.compile(model)  # copies become part of their neighbours",
    "SS007": "optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)",
    "SS008": "model = torch.compile(model)  # casts become part of their neighbours",
    "SS009": "vocab = 64 * math.ceil(vocab / 64)  # so with every width; rows that no token names are never read",
    "SS010": 'model = torch.compile(model, mode="max-autotune")  # chooses among tiles',
    "SS011": (
        "model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=100, gradient_as_bucket_view=True)\n"
        "with model.no_sync():  # all but the last micro-batch\n"
        "    loss.backward()"
    ),
    "SS012": (
        "loader = torch.utils.data.DataLoader(data, batch_size=batch, num_workers=8, pin_memory=True)\n"
        'x = x.to("cuda", non_blocking=True)'
    ),
    "SS013": (
        "for number, block in enumerate(blocks):  # recompute every second block only\n"
        "    x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if number % 2 else block(x)"
    ),
    "SS015": "loader = torch.utils.data.DataLoader(data, batch_size=2 * batch)  # more rows, in the same time",
    "SS017": (
        "loader = torch.utils.data.DataLoader(data, batch_size=batch, pin_memory=True)\n"
        'x = x.to("cuda", non_blocking=True)'
    ),
    "SS018": (
        "losses.append(loss.detach())  # no .item() and no torch.cuda.synchronize() in the loop\n"
        "if step % 100 == 99:\n"
        "    print(torch.stack(losses).mean().item())"
    ),
    "SS019": (
        "with torch.profiler.profile(with_stack=True) as profiler:  # what the host did then\n"
        "    train_step()\n"
        'profiler.export_chrome_trace("trace.json")'
    ),
    "SS020": (
        "with torch.cuda.stream(copying):  # copying = torch.cuda.Stream(): one layer ahead\n"
        "    weight.copy_(pinned_weight, non_blocking=True)\n"
        "torch.cuda.current_stream().wait_stream(copying)  # before the layer runs"
    ),
}
_LONGEST_NAME = 1000  # a longer one is no name to type
# What changes the settings of a run of ours: nothing, where the setting has that value already.
_Change = Callable[[Workload], dict[str, object]]


def _compile(workload: Workload) -> dict[str, object]:
    return {} if workload.compile else {"compile": True}


def _compile_or_grow(workload: Workload) -> dict[str, object]:
    return _compile(workload) or _grow(workload)


def _grow(workload: Workload) -> dict[str, object]:
    return {"batch": 2 * workload.batch}


def _leave_fp16(workload: Workload) -> dict[str, object]:
    """Its gradient scaler waits for the GPU once a step."""
    return {"precision": "bf16"} if workload.precision == "fp16" else {}


def _fuse_attention(workload: Workload) -> dict[str, object]:
    """A model of one's own chooses its attention itself: there is no setting to change."""
    return {} if workload.attention in (None, "flash") else {"attention": "flash"}


def _lower_precision(workload: Workload) -> dict[str, object]:
    """TF32, which the saving is an estimate of; bf16 saves more and rounds more."""
    return {"precision": "tf32"} if workload.precision == "fp32" and workload.device != "cpu" else {}


def _fuse_optimizer(workload: Workload) -> dict[str, object]:
    return {"optimizer": "adamw-fused"} if workload.optimizer in ("adamw", "adamw-torch", None) else {}


def _pad_vocabulary(workload: Workload) -> dict[str, object]:
    model = workload.model
    if not isinstance(model, ModelShape) or model.vocab % 64 == 0:
        return {}
    fields = {name: getattr(model, name) for name in ModelShape.__struct_fields__}
    return {"model": ModelShape(**fields | {"vocab": 64 * math.ceil(model.vocab / 64)})}


def _keep_activations(workload: Workload) -> dict[str, object]:
    return {} if workload.checkpoint == "none" else {"checkpoint": "none"}


_CHANGES: dict[str, _Change] = {
    "SS001": _compile_or_grow,
    "SS002": _leave_fp16,
    "SS003": _compile,
    "SS004": _fuse_attention,
    "SS005": _lower_precision,
    "SS006": _compile,
    "SS007": _fuse_optimizer,
    "SS008": _compile,
    "SS009": _pad_vocabulary,
    "SS010": _grow,
    "SS013": _keep_activations,
    "SS015": _grow,
}


def advise(finding: Finding, profile: Profile) -> Advice:
    """A finding with what to copy: commands first where the run is one of ours."""
    manifest = profile.recording.manifest
    workload = manifest.case.workload if manifest.case else None
    commands = _commands(finding.code, workload)
    if finding.code == "SS007" and manifest.optimizer not in (None, *get_args(Optimizer)):
        commands = []  # a factory's own, which no flag replaces
    fixes = [*commands, *_lookups(finding.code, profile)]
    # The built-in model is not the user's to edit; where a flag mends it, Python to paste would be beside the point.
    is_builtin = workload is not None and isinstance(workload.model, ModelShape)
    if finding.code in _PYTHON and not (fixes and is_builtin):
        fixes.append(Copyable(label="in your own code", text=_PYTHON[finding.code]))
    return Advice(finding=finding, fixes=tuple(fixes))


def _commands(code: str, workload: Workload | None) -> list[Copyable]:
    if workload is None or code not in _CHANGES:
        return []
    changes = _CHANGES[code](workload)
    if not changes:
        return []
    return [
        Copyable(
            label="the same run with it", text=write_command("report", msgspec.structs.replace(workload, **changes))
        )
    ]


def _lookups(code: str, profile: Profile) -> list[Copyable]:
    """For findings that are no fault: what tells more."""
    match code:
        case "SS014":
            longest = profile.time_by("name").row(0, named=True)["name"]
            if not longest.isprintable() or len(longest) > _LONGEST_NAME:
                return [Copyable(label="what this means", text=f"stepscope rule {code}")]
            return [Copyable(label="what the longest kernel is", text=shlex.join(["stepscope", "kernel", longest]))]
        case "SS016":
            return [Copyable(label="what disturbs the machine", text="stepscope doctor")]
        case _:
            return []
