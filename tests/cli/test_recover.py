"""`stepscope recover` in a subprocess."""

import gzip
import json
from pathlib import Path

from tests.cli.command import stepscope

FIXTURES = Path(__file__).parents[1] / "fixtures"
EVIDENCE = FIXTURES / "evidence"


def test_json_has_candidates_and_fields(tmp_path: Path) -> None:
    done = stepscope(tmp_path, "recover", str(EVIDENCE / "gpt2_bf16_odd.csv.gz"), "--format", "json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    keys = ["num_layers", "d_model", "num_heads", "num_kv_heads", "d_head", "d_ff", "vocab_size", "batch", "context"]
    keys += ["dtype", "parameters"]
    assert list(answer["candidates"][0]) == keys
    assert list(answer["fields"]) == keys
    assert {"value", "certain", "alternatives", "evidence"} <= set(answer["fields"]["d_ff"])
    assert answer["fields"]["context"]["value"] == 200


def test_shapes_are_used_only_when_asked(tmp_path: Path) -> None:
    trace = str(EVIDENCE / "llama_bf16.forward.json.gz")
    without, with_shapes = (
        json.loads(stepscope(tmp_path, "recover", trace, "--format", "json", *flags).stdout)["fields"]["vocab_size"]
        for flags in ((), ("--use-shapes",))
    )
    assert (without["value"], without["certain"]) == (None, False)
    assert (with_shapes["value"], with_shapes["certain"]) == (32000, True)


def test_undecided_evidence_exits_with_three(tmp_path: Path) -> None:
    lines = gzip.decompress((EVIDENCE / "gpt2_bf16_odd.csv.gz").read_bytes()).decode().splitlines(keepends=True)
    (tmp_path / "no.csv").write_text("".join(line for line in lines if "nvjet" not in line and "cutlass" not in line))
    done = stepscope(tmp_path, "recover", "no.csv")
    assert done.returncode == 3
    assert "cannot tell" in done.stdout


def test_a_compiled_trace_says_what_would_decide(tmp_path: Path) -> None:
    done = stepscope(tmp_path, "recover", str(EVIDENCE / "llama_compiled.forward.json.gz"))
    assert done.returncode == 0, done.stderr
    assert "2 of 11 fields certain" in done.stdout
    assert "to narrow this down: add counters" in done.stdout


def test_a_truncated_csv_has_no_certain_num_layers(tmp_path: Path) -> None:
    text = gzip.decompress((EVIDENCE / "held_gpt2.csv.gz").read_bytes())
    (tmp_path / "cut.csv").write_bytes(text[: len(text) * 2 // 3])
    done = stepscope(tmp_path, "recover", "cut.csv", "--format", "json")
    answer = json.loads(done.stdout)
    assert done.returncode in (0, 3)
    assert not answer.get("fields", {}).get("num_layers", {}).get("certain")


def test_missing_metrics_leave_more_open(tmp_path: Path) -> None:
    text = gzip.decompress((EVIDENCE / "gpt2_bf16_odd.csv.gz").read_bytes()).decode()
    (tmp_path / "few.csv").write_text(text.replace("sm__sass_data_bytes_mem_global_op_st.sum", "other.sum"))
    fields = json.loads(stepscope(tmp_path, "recover", "few.csv", "--format", "json").stdout)["fields"]
    assert not fields["d_model"]["certain"]
    assert fields["d_model"]["value"] == 640


def test_missing_kernels_and_missing_files_are_bad_input(tmp_path: Path) -> None:
    (tmp_path / "empty.json").write_text('{"traceEvents": []}')
    for file in ("empty.json", "nowhere.json"):
        done = stepscope(tmp_path, "recover", file)
        assert done.returncode == 2, done.stdout
        assert done.stderr.startswith("error: ")


def test_a_flag_without_effect_is_an_error(tmp_path: Path) -> None:
    file = str(EVIDENCE / "gpt2_bf16_odd.csv.gz")
    for flags, problem in (
        (("--nonce", "1"), "`--nonce` requires `--sign`"),
        (("--settings", "x.json"), "`--settings` requires `--study`"),
        (("--study", "--use-shapes"), "`--use-shapes` cannot be used with `--study`"),
    ):
        done = stepscope(tmp_path, "recover", file, *flags)
        assert done.returncode == 2
        assert problem in done.stderr


def test_a_study_of_two_runs(tmp_path: Path) -> None:
    grid = Path(__file__).parents[2] / "bench" / "results" / "counters_h200"
    done = stepscope(tmp_path, "recover", "--study", str(grid))
    assert done.returncode == 0, done.stderr
    attention = next(line for line in done.stdout.splitlines() if line.startswith("attention") and "tensor ops" in line)
    assert "1.58" in attention
