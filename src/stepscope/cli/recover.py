"""`stepscope recover`: what model made these counters?"""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from stepscope.cli.output import say, show, show_parts, show_tables
from stepscope.errors import Exit, StepscopeError
from stepscope.render.formats import Format


def recover(
    evidence: Annotated[
        list[Path],
        typer.Argument(metavar="EVIDENCE...", help="Traces, counters (ncu --csv) and memory snapshots of one run."),
    ],
    use_shapes: Annotated[
        bool, typer.Option("--use-shapes", help="Believe the shapes that a profiler wrote beside the kernels.")
    ] = False,
    study: Annotated[
        bool, typer.Option("--study", help="EVIDENCE is a grid of runs: which counter reveals which field?")
    ] = False,
    settings: Annotated[
        Path | None,
        typer.Option("--settings", metavar="FILE", help="With --study: what runs were, where files do not say (JSON)."),
    ] = None,
    sign: Annotated[Path | None, typer.Option("--sign", metavar="KEY", help="Sign the answer with this key.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="REPORT", help="With --sign: where the report goes (report.json).")
    ] = None,
    nonce: Annotated[str | None, typer.Option("--nonce", help="With --sign: the verifier's number.")] = None,
    weights: Annotated[
        Path | None, typer.Option("--weights", metavar="PATH", help="With --sign: weights whose hash goes along.")
    ] = None,
    gpu_uuid: Annotated[str | None, typer.Option("--gpu-uuid", help="With --sign: of the GPU.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a report that is there.")] = False,
    format_: Annotated[Format, typer.Option("--format", help="How it is printed.")] = Format.TEXT,
) -> None:
    """What model ran, from a GPU's counters or a bare trace: layers, width, heads, feed-forward width, vocabulary,
    batch, context, data type, parameters; what is certain, what else it could be, and what would decide.

    Names, grids, durations and counters are read; shapes, modules and stacks are not, unless --use-shapes.
    Exit 3: the evidence cannot tell.
    """
    from stepscope.jobs import recover as job
    from stepscope.jobs.signing import make_report, read_flags, sign_to_file
    from stepscope.recover.reports.signed_report import hash_files

    if study:
        given = {"--sign": sign, "--out": out, "--nonce": nonce, "--weights": weights, "--gpu-uuid": gpu_uuid}
        job.check_study_flags({**given, "--use-shapes": use_shapes, "--force": force})
        show_tables(job.study_files(evidence, settings), format_)
        return
    if settings is not None:
        raise StepscopeError("`--settings` does nothing without `--study`", hint="--study, or leave it out")
    signing = read_flags(sign, nonce=nonce, weights=weights, gpu_uuid=gpu_uuid, out=out, force=force, inputs=evidence)
    seen = hash_files(evidence) if signing is not None else ()
    result, device = job.recover_files(evidence, use_shapes=use_shapes)
    if format_ is Format.JSON:
        show(job.encode(result))
    else:
        show_parts(job.describe(result, evidence), format_)
    if signing is not None:
        report = out or Path("report.json")
        made = make_report(signing, job.state(result), evidence, device=device, seen=seen)
        sign_to_file(made, signing, report, force=force)
        say(f"signed report: {report}")
    if job.exit_code(result) is Exit.OK:
        say(f"next: stepscope verify {shlex.join(map(str, evidence))} --claim FILE, with what was claimed in it")
    raise typer.Exit(job.exit_code(result))
