"""`stepscope verify`."""

import gzip
import json
from pathlib import Path

import pytest

from stepscope.errors import Exit
from stepscope.jobs.signing import gpus_of_this_machine
from tests.cli.command import stepscope

EVIDENCE = Path(__file__).parents[1] / "fixtures" / "evidence"
COUNTERS = str(EVIDENCE / "gpt2_bf16_odd.csv.gz")
CLAIM = {
    "num_layers": 2,
    "d_model": 640,
    "num_heads": 10,
    "d_ff": 2560,
    "vocab_size": 32003,
    "batch": 3,
    "context": 200,
    "dtype": "bf16",
    "gated": False,
}


def write_claim(folder: Path, **changes: object) -> str:
    fields = {name: value for name, value in {**CLAIM, **changes}.items() if value is not None}
    (folder / "claim.json").write_text(json.dumps(fields))
    return "claim.json"


def test_a_true_claim_is_consistent_and_tested(tmp_path: Path) -> None:
    done = stepscope(tmp_path, "verify", COUNTERS, "--claim", write_claim(tmp_path), "--format", "json")
    assert done.returncode == Exit.OK, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert answer["verdict"] == "consistent"
    assert answer["refuted_by"] == []
    assert {answer["fields"][name]["verdict"] for name in CLAIM} == {"tested"}
    assert answer["fields"]["d_head"] == {
        "claimed": 64,
        "verdict": "tested",
        "passes_too": [[62, 63]],
        "implied": True,
    }


def test_a_false_claim_is_refuted_by_a_kernel(tmp_path: Path) -> None:
    done = stepscope(tmp_path, "verify", COUNTERS, "--claim", write_claim(tmp_path, d_ff=3072))
    assert done.returncode == Exit.GATE_FAILED, done.stdout + done.stderr
    assert "refuted" in done.stdout.splitlines()[0]
    assert "#19 bf16 GEMM 128×104" in done.stdout
    assert "expected M 600, N 3,072, K 640" in done.stdout
    assert "tensor_ops 2,044,723,200" in done.stdout
    table = stepscope(tmp_path, "verify", COUNTERS, "--claim", "claim.json", "--format", "csv")
    assert "feed-forward down projection" in table.stdout


def test_a_transformers_config_with_flags_is_a_claim(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 640, "n_head": 10, "n_inner": None, "vocab_size": 32003}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = ["verify", COUNTERS, "--claim", "config.json", "--dtype", "bf16", "--context", "200", "--batch"]
    assert stepscope(tmp_path, *asked, "3").returncode == Exit.OK
    assert stepscope(tmp_path, *asked, "6").returncode == Exit.GATE_FAILED


def test_the_saved_result_of_recover_is_a_claim(tmp_path: Path) -> None:
    recovered = stepscope(tmp_path, "recover", COUNTERS, "--format", "json")
    (tmp_path / "model.json").write_text(recovered.stdout)
    done = stepscope(tmp_path, "verify", COUNTERS, "--claim", "model.json", "--format", "json")
    assert done.returncode == Exit.OK, done.stdout + done.stderr
    claimed = {name: field["claimed"] for name, field in json.loads(done.stdout)["fields"].items()}
    certain = {name: one["value"] for name, one in json.loads(recovered.stdout)["fields"].items() if one["certain"]}
    assert certain
    assert {name: value for name, value in claimed.items() if value is not None} == certain
    other = str(EVIDENCE / "held_gpt2.csv.gz")
    assert stepscope(tmp_path, "verify", other, "--claim", "model.json").returncode == Exit.GATE_FAILED


@pytest.mark.parametrize(
    ("claim", "says"),
    [
        ({"n_layers": 2}, "did you mean num_layers?"),
        ({"d_ff": -1}, "invalid d_ff: `-1`"),
        ({"num_kv_heads": 3}, "num_heads `10` is not divisible by num_kv_heads `3`"),
    ],
)
def test_an_invalid_claim_is_rejected(tmp_path: Path, claim: dict[str, object], says: str) -> None:
    done = stepscope(tmp_path, "verify", COUNTERS, "--claim", write_claim(tmp_path, **claim))
    assert done.returncode == Exit.BAD_INPUT
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_evidence_of_another_model_cannot_tell(tmp_path: Path) -> None:
    lines = gzip.decompress(Path(COUNTERS).read_bytes()).decode().splitlines(keepends=True)
    kept = [line for line in lines if "nvjet" not in line and "cutlass" not in line]
    (tmp_path / "elementwise.csv").write_text("".join(kept))
    done = stepscope(tmp_path, "verify", "elementwise.csv", "--claim", write_claim(tmp_path))
    assert done.returncode == Exit.UNDECIDED, done.stdout + done.stderr
    assert "no GEMM kernels" in done.stdout
    (tmp_path / "empty.csv").write_text("".join(lines[:2]))
    assert stepscope(tmp_path, "verify", "empty.csv", "--claim", "claim.json").returncode == Exit.BAD_INPUT


def test_a_truncated_file_cannot_tell(tmp_path: Path) -> None:
    whole = gzip.decompress(Path(COUNTERS).read_bytes())
    (tmp_path / "cut.csv").write_bytes(whole[: len(whole) * 2 // 3])
    done = stepscope(tmp_path, "verify", "cut.csv", "--claim", write_claim(tmp_path))
    assert done.returncode == Exit.UNDECIDED, done.stdout + done.stderr
    assert "the file ends in the middle of a row" in done.stdout


def test_a_signed_report_is_checked_with_its_nonce_and_files(tmp_path: Path) -> None:
    assert stepscope(tmp_path, "key", "new", "lab.key").returncode == Exit.OK
    made = stepscope(
        tmp_path, "verify", COUNTERS, "--claim", write_claim(tmp_path), "--sign", "lab.key", "--nonce", "abc1",
        "--gpu-uuid", "GPU-01234567-89ab-cdef-0123-456789abcdef", "--out", "report.json",
    )  # fmt: skip
    assert made.returncode == Exit.OK, made.stderr
    check = ["verify", COUNTERS, "--signed", "report.json", "--public-key", "lab.key.pub", "--nonce"]
    good = stepscope(tmp_path, *check, "abc1")
    assert good.returncode == Exit.OK, good.stdout + good.stderr
    assert "consistent" in good.stdout
    replayed = stepscope(tmp_path, *check, "abc2")
    assert replayed.returncode == Exit.GATE_FAILED
    report = (tmp_path / "report.json").read_bytes()
    (tmp_path / "report.json").write_bytes(report.replace(b"consistent", b"Consistent", 1))
    assert stepscope(tmp_path, *check, "abc1").returncode == Exit.GATE_FAILED


@pytest.mark.parametrize(
    "flags", [[], ["--signed", "r.json"], ["--claim", "c.toml", COUNTERS, "--nonce", "a"], ["--public-key", "k"]]
)
def test_incompatible_flags_are_rejected(tmp_path: Path, flags: list[str]) -> None:
    done = stepscope(tmp_path, "verify", *flags)
    assert done.returncode == Exit.BAD_INPUT
    assert "hint:" in done.stderr


CHALLENGE = ["--nonce", "5f0c21", "--max-tokens", "8192"]


def test_a_challenge_is_printed_and_checked(tmp_path: Path) -> None:
    asked = stepscope(tmp_path, "verify", *CHALLENGE, "--format", "json")
    assert asked.returncode == Exit.OK, asked.stderr
    shown = {row["what"]: row["value"] for row in json.loads(asked.stdout)["rows"]}
    assert (shown["batch"], shown["context"]) == ("8", "960")
    assert "--batch 8 --context 960" in asked.stderr
    claim = write_claim(tmp_path, batch=None, context=None)
    done = stepscope(tmp_path, "verify", COUNTERS, "--claim", claim, *CHALLENGE)
    assert done.returncode == Exit.GATE_FAILED, done.stdout + done.stderr
    assert "expected 7,680 rows of 640 elements; got 600 or 200 rows" in done.stdout
    assert "challenge 5f0c21: batch 8, context 960" in done.stdout


def test_a_signed_report_answers_a_challenge_or_not(tmp_path: Path) -> None:
    assert stepscope(tmp_path, "key", "new", "lab.key").returncode == Exit.OK
    claim = write_claim(tmp_path, batch=None, context=None)
    sign = ["verify", COUNTERS, "--claim", claim, "--sign", "lab.key", "--out"]
    answered = stepscope(tmp_path, *sign, "answered.json", *CHALLENGE)
    assert answered.returncode == Exit.GATE_FAILED, answered.stderr
    plain = stepscope(tmp_path, *sign, "plain.json", "--nonce", "5f0c21", "--batch", "3", "--context", "200")
    assert plain.returncode == Exit.OK, plain.stderr
    check = ["verify", "--public-key", "lab.key.pub", "--signed"]
    assert stepscope(tmp_path, *check, "answered.json", *CHALLENGE).returncode == Exit.OK
    assert stepscope(tmp_path, *check, "plain.json", "--nonce", "5f0c21").returncode == Exit.OK
    refused = stepscope(tmp_path, *check, "plain.json", *CHALLENGE)
    assert refused.returncode == Exit.GATE_FAILED
    assert "does not answer a challenge" in refused.stdout
    assert stepscope(tmp_path, *check, "answered.json", *CHALLENGE, "--max-context", "512").returncode == 1


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--max-tokens", "8192"], "`--max-tokens` requires `--nonce`"),
        (["--nonce", "a", "--max-context", "512"], "`--max-context` requires `--max-tokens`"),
        (["--nonce", "a b", "--max-tokens", "8192"], "invalid nonce"),
        (["--nonce", "a", "--max-tokens", "8"], "`--max-tokens 8` is out of range"),
        ([*CHALLENGE, "--replay", "2"], "evidence and `--claim` are required"),
        ([*CHALLENGE, "--sign", "lab.key"], "evidence and `--claim` are required"),
        ([COUNTERS, "--claim", "claim.json", *CHALLENGE], "the claim has batch `3`, and the nonce asks for `8`"),
        ([COUNTERS, "--claim", "claim.json", "--replay", "2"], "cannot be built for `--replay`"),
        (["--signed", "r.json", "--public-key", "k", "--replay", "2"], "`--replay` cannot be used with `--signed`"),
    ],
)
def test_a_bad_challenge_or_replay_is_rejected(tmp_path: Path, flags: list[str], says: str) -> None:
    write_claim(tmp_path)
    done = stepscope(tmp_path, "verify", *flags)
    assert done.returncode == Exit.BAD_INPUT, done.stdout
    assert says in done.stderr


@pytest.mark.skipif(bool(gpus_of_this_machine()), reason="there is a GPU here")
def test_a_replay_without_a_gpu_ends_at_once(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 640, "n_head": 10, "vocab_size": 32003}
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = ["--batch", "3", "--context", "200", "--dtype", "bf16"]
    done = stepscope(tmp_path, "verify", "missing.csv", "--claim", "config.json", *sizes, "--replay", "2")
    assert done.returncode == Exit.BAD_INPUT
    assert "`--replay` requires a GPU, which this machine does not have" in done.stderr
    assert "hint: remove --replay" in done.stderr


def test_control_sequences_in_kernel_names_are_not_printed(tmp_path: Path) -> None:
    text = gzip.decompress(Path(COUNTERS).read_bytes()).decode()
    (tmp_path / "evil.csv").write_text(text.replace("vectorized_gather_kernel", "\x1b]0;owned\x07kernel"))
    done = stepscope(tmp_path, "verify", "evil.csv", "--claim", write_claim(tmp_path))
    assert "\x1b]" not in done.stdout


def test_untested_parameters_are_not_consistent(tmp_path: Path) -> None:
    (tmp_path / "claim.toml").write_text("parameters = 7_000_000_000\n")
    done = stepscope(tmp_path, "verify", str(EVIDENCE / "gpt2_bf16_odd.csv.gz"), "--claim", "claim.toml")
    assert done.returncode == 3, done.stdout


def test_flags_without_effect_on_a_signed_report_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("{}")
    done = stepscope(tmp_path, "verify", "--signed", "report.json", "--public-key", "x", "--weights", "w.bin")
    assert done.returncode == 2
    assert "`--weights` cannot be used with `--signed`" in done.stderr
