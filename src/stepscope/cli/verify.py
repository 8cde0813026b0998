"""`stepscope verify`: check a claim about a model against a run."""

import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.cli.options import FormatFlag
from stepscope.cli.output import if_interrupted, say, show, show_parts, showing_stages
from stepscope.cli.signing import (
    ForceFlag,
    GpuUuidFlag,
    KeyFlag,
    PublicKeyFlag,
    ReportFlag,
    SignedFlag,
    WeightsFlag,
    print_challenge,
    print_signed,
)
from stepscope.errors import StepscopeError
from stepscope.render.formats import Format

if TYPE_CHECKING:
    from stepscope.jobs.verify import Verified


def verify(
    evidence: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="EVIDENCE...", help="Traces, counters (ncu --csv) and memory snapshots of a single run."
        ),
    ] = None,
    claim: Annotated[
        Path | None,
        typer.Option(
            "--claim",
            metavar="FILE",
            help="The claimed sizes (TOML or JSON), a transformers config.json, or output of `recover --format json`.",
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Add a batch size to the claim.")] = None,
    context: Annotated[int | None, typer.Option("--context", min=1, help="Add a context length to the claim.")] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Add a data type to the claim: fp32, tf32, fp16 or bf16.")
    ] = None,
    sign: KeyFlag = None,
    out: ReportFlag = None,
    nonce: Annotated[
        str | None,
        typer.Option("--nonce", help="With --sign: the nonce the verifier sent; with --signed: the nonce to expect."),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            metavar="N",
            help="With --nonce: a challenge. Batch and context follow from the nonce, with at most N tokens. Without "
            "EVIDENCE, print them.",
        ),
    ] = None,
    max_context: Annotated[
        int | None,
        typer.Option("--max-context", metavar="N", help="With --max-tokens: the longest context.  [default: 1024]"),
    ] = None,
    replay: Annotated[
        int | None,
        typer.Option(
            "--replay",
            metavar="N",
            min=2,
            help="Run N layers of the claimed model on this machine's GPU, and compare every kernel with them.",
        ),
    ] = None,
    weights: WeightsFlag = None,
    gpu_uuid: GpuUuidFlag = None,
    signed: SignedFlag = None,
    public_key: PublicKeyFlag = None,
    force: ForceFlag = False,
    format_: FormatFlag = Format.TEXT,
) -> None:
    """Check whether a run matches a claimed model. Predicts the work of every kernel from the claim and compares it
    with the evidence. Counters show the shape of the work, not the weights or the data.

    Exit 0: consistent. Exit 1: refuted, naming the kernel. Exit 3: cannot tell, naming what is missing.
    """
    from stepscope.jobs import verify as job
    from stepscope.jobs.signing import make_report, read_challenge, read_flags, require_public_key, sign_to_file
    from stepscope.recover.reports.signed_report import hash_files

    files = evidence or []
    challenge = read_challenge(nonce, max_tokens=max_tokens, max_context=max_context)
    if signed is not None:
        given = {"--claim": claim, "--sign": sign, "--weights": weights, "--gpu-uuid": gpu_uuid, "--out": out}
        more = {"--batch": batch, "--context": context, "--dtype": dtype, "--force": force or None, "--replay": replay}
        key = require_public_key(public_key, {**given, **more})
        print_signed(signed, key, files, nonce=nonce, format_=format_, challenge=challenge)
        return
    if challenge is not None and not any((files, claim, sign, out, weights, gpu_uuid, public_key, replay)):
        print_challenge(challenge, format_)
        return
    if claim is None or not files:
        raise StepscopeError(
            "evidence and `--claim` are required",
            detail="to check a signed report instead, use `--signed` and `--public-key`",
            hint="stepscope verify EVIDENCE --claim claim.toml",
        )
    if public_key is not None:
        raise StepscopeError("`--public-key` requires `--signed`", hint="add --signed REPORT")
    signing = read_flags(
        sign,
        nonce=nonce if sign is not None or challenge is None else None,
        weights=weights,
        gpu_uuid=gpu_uuid,
        out=out,
        force=force,
        inputs=[*files, claim],
    )
    seen = hash_files(files) if signing is not None else ()
    check = partial(job.verify_files, files, claim, batch=batch, context=context, dtype=dtype, challenge=challenge)
    verified = check() if replay is None else _replay(replay, check)
    if format_ is Format.JSON:
        show(job.encode(verified))
    else:
        show_parts(job.describe(verified, files), format_)
    if signing is not None:
        path = out or Path("report.json")
        report = make_report(signing, job.state(verified), files, claim=claim, device=verified.device, seen=seen)
        sign_to_file(report, signing, path, force=force)
        say(f"next: stepscope verify --signed {shlex.quote(str(path))} --public-key {shlex.quote(f'{sign}.pub')}")
    else:
        say(f"next: stepscope recover {shlex.join(map(str, files))}")
    raise typer.Exit(job.exit_code(verified))


def _replay(layers: int, check: "Callable[..., Verified]") -> "Verified":
    from stepscope.jobs.replay import LocalGpu, Replayer

    left = "nothing was signed; without --replay, the comparison takes seconds"
    with if_interrupted(left), showing_stages() as on_stage, LocalGpu(on_stage) as machine:
        return check(replayer=Replayer(layers=layers, machine=machine))
