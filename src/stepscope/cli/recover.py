"""`stepscope recover`: infer the model from GPU counters or a trace."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from stepscope.cli.options import FormatFlag
from stepscope.cli.output import say, show, show_parts, show_tables
from stepscope.cli.signing import ForceFlag, GpuUuidFlag, KeyFlag, ReportFlag, WeightsFlag
from stepscope.errors import Exit, StepscopeError
from stepscope.render.formats import Format


def recover(
    evidence: Annotated[
        list[Path],
        typer.Argument(
            metavar="EVIDENCE...", help="Traces, counters (ncu --csv) and memory snapshots of a single run."
        ),
    ],
    use_shapes: Annotated[
        bool, typer.Option("--use-shapes", help="Trust the GEMM shapes that the profiler recorded.")
    ] = False,
    study: Annotated[
        bool,
        typer.Option("--study", help="Treat EVIDENCE as a grid of runs and show which counter reveals which field."),
    ] = False,
    settings: Annotated[
        Path | None,
        typer.Option(
            "--settings", metavar="FILE", help="With --study: a JSON file with the settings of runs that lack them."
        ),
    ] = None,
    sign: KeyFlag = None,
    out: ReportFlag = None,
    nonce: Annotated[str | None, typer.Option("--nonce", help="With --sign: the nonce the verifier sent.")] = None,
    weights: WeightsFlag = None,
    gpu_uuid: GpuUuidFlag = None,
    force: ForceFlag = False,
    format_: FormatFlag = Format.TEXT,
) -> None:
    """Infer which model ran from GPU counters or a trace: num_layers, d_model, num_heads, num_kv_heads, d_head, d_ff,
    vocab_size, batch, context, dtype and parameters. Shows which values are certain and what else the others could be.

    Reads kernel names, grids, durations and counters. Ignores module names, stacks and (without --use-shapes) shapes.
    Exit 3: the evidence does not determine any size.
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
        raise StepscopeError("`--settings` requires `--study`", hint="add --study, or remove --settings")
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
        say(f"next: stepscope verify {shlex.join(map(str, evidence))} --claim CLAIM")
    raise typer.Exit(job.exit_code(result))
