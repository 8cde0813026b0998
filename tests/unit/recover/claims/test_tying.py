"""Whether the LM head shares the embedding's weights: what shows it, and what a claim about it is worth."""

import json
from pathlib import Path

import msgspec
import pytest

from stepscope.errors import Exit
from stepscope.jobs.verify import Verified, describe, exit_code
from stepscope.recover.claims.claim import make_claim, read_claim
from stepscope.recover.claims.claimed_run import open_all
from stepscope.recover.claims.tying import read_step
from stepscope.recover.claims.verdict import ClaimVerdict
from stepscope.recover.claims.verification import verify
from stepscope.recover.facts import Sighting
from tests.unit.recover.claimed_runs import spoil, true_claim
from tests.unit.recover.evidence_runs import COUNTERS, TRACES, TRUTHS, read_evidence

STEPS = [file for file in TRACES if ".train." in file]
# The optimizer's chunks leave room for both kinds of model.
OPEN = ("builtin_autocast.train.json.gz", "builtin_fp32.train.json.gz", "llama_compiled.train.json.gz")
COMPILED = "gpt2_compiled.train.json.gz"  # the sum of the gradients is part of another kernel
SNAPSHOTS = ("gpt2_fp32_efficient", "llama_bf16")


def is_tied(file: str) -> bool:
    truth = TRUTHS[file.partition(".")[0]]
    apart = true_claim(file, num_layers=truth["num_layers"]).count_matrices(is_tied=False)
    assert apart is not None
    return bool(truth["parameters"] < apart)


@pytest.mark.parametrize("file", STEPS)
def test_a_training_step_shows_whether_the_head_is_tied(file: str) -> None:
    true = verify([read_evidence(file)], true_claim(file, tied=is_tied(file)))
    false = verify([read_evidence(file)], true_claim(file, tied=not is_tied(file)))
    assert true.fields["tied"].verdict == ("not tested" if file in OPEN else "tested")
    assert true.verdict is not ClaimVerdict.REFUTED
    if file in (*OPEN, COMPILED):
        assert (false.verdict, false.fields["tied"].verdict) == (ClaimVerdict.UNDECIDED, "not tested")
    else:
        assert (false.verdict, false.fields["tied"].verdict) == (ClaimVerdict.REFUTED, "refuted")
        assert "tied" in {one.what for one in false.refuted_by}


@pytest.mark.parametrize("run", SNAPSHOTS)
@pytest.mark.parametrize("claimed", [True, False])
def test_a_snapshot_shows_whether_the_head_is_tied(run: str, claimed: bool) -> None:
    file = f"{run}.forward.json.gz"
    evidence = [read_evidence(file), read_evidence(f"{run}.snapshot.pickle.gz")]
    answer = verify(evidence, true_claim(file, tied=claimed))
    assert answer.fields["tied"].verdict == ("tested" if claimed == is_tied(file) else "not tested")
    assert answer.verdict is not ClaimVerdict.REFUTED


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("file", [*COUNTERS, *(file for file in TRACES if ".forward." in file)])
def test_a_forward_pass_does_not_show_it(file: str, tied: bool) -> None:
    answer = verify([read_evidence(file)], make_claim({"num_layers": true_claim(file).num_layers, "tied": tied}))
    assert answer.verdict is ClaimVerdict.UNDECIDED
    assert answer.not_tested == ("tied",)
    assert exit_code(Verified(verification=answer)) is Exit.UNDECIDED


def test_without_a_sum_of_gradients_the_embedding_may_be_frozen() -> None:
    def leave_out(kernels: list[Sighting]) -> list[Sighting]:
        return [one for one in kernels if one.name.operation != "add"]

    answer = spoil("held_gpt2_fp16.train.json.gz", leave_out, tied=False)
    assert answer.fields["tied"].verdict in ("not tested", "not refuted")
    assert not any(one.what == "tied" for one in answer.refuted_by)


def test_without_a_sum_of_gradients_layers_may_be_missing() -> None:
    """A model with more layers and a tied head has as many parameters as one with fewer layers and another head."""
    file = "gpt2_fp32_efficient.train.json.gz"

    def leave_out(kernels: list[Sighting]) -> list[Sighting]:
        return [one for one in kernels if one.name.operation != "add" or one.grid[0] < 10_000]

    answer = spoil(file, leave_out)
    assert answer.verdict is ClaimVerdict.UNDECIDED
    assert "no gradients of a tied one are added" in answer.why


def test_an_optimizer_may_fit_neither_kind_of_head() -> None:
    """Too many parameters for a tied head, and too few for the claimed layers with another one."""
    file = "neox_fp16.train.json.gz"
    evidence, claim = read_evidence(file), true_claim(file)
    (genuine,) = read_step(open_all([evidence], claim).files[0], claim, open_all([evidence], claim).shape)
    assert (genuine.is_tied, genuine.doubt) == (False, "")
    deeper = true_claim(file, num_layers=2 * (claim.num_layers or 0))
    (found,) = read_step(open_all([evidence], deeper).files[0], deeper, open_all([evidence], deeper).shape)
    assert "and to at most 62,652,416, but at least" in found.doubt


def test_gradients_that_are_added_to_earlier_ones_show_nothing() -> None:
    file = "held_gpt2_fp16.train.json.gz"
    truth = TRUTHS["held_gpt2_fp16"]
    adds = [one for one in read_evidence(file).sightings if one.name.operation == "add" and one.grid[0] > 1000]
    weight = truth["d_model"] * truth["d_ff"]
    added = msgspec.structs.replace(adds[0], grid=(-(-weight // 1024), 1, 1))

    def accumulate(kernels: list[Sighting]) -> list[Sighting]:
        place = next(index for index, one in enumerate(kernels) if one.name.kernel_class == "optimizer")
        return [*kernels[:place], added, *kernels[place:]]

    answer = spoil(file, accumulate, tied=False)
    assert not any(one.what == "tied" for one in answer.refuted_by)
    assert not any("no gradients of a tied one" in text for text in spoil(file, accumulate).missing)


def test_a_config_only_implies_it(tmp_path: Path) -> None:
    """Whoever claims a published config does not ask how its weights are stored."""
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 640, "n_head": 10, "vocab_size": 32003}
    (tmp_path / "config.json").write_text(json.dumps(config))
    claim = read_claim(tmp_path / "config.json", batch=3, context=200)
    answer = verify([read_evidence("gpt2_bf16_odd.csv.gz")], claim)
    assert answer.verdict is ClaimVerdict.CONSISTENT
    assert answer.not_tested == ("tied",)
    assert answer.fields["tied"].implied
    first, second, *_ = (part for part in describe(Verified(verification=answer), [Path("a.csv")]) if part)
    assert "consistent" in str(first)
    assert str(second).startswith("  tested: num_layers, d_model")
    assert str(second).endswith("; not tested: tied (implied)\n")


def test_the_fields_are_listed_by_how_they_were_tested() -> None:
    answer = verify([read_evidence("llama_bf16.forward.json.gz")], true_claim("llama_bf16.forward.json.gz"))
    assert answer.not_tested == ("vocab_size",)
    assert set(answer.tested) | set(answer.narrowed) == set(true_claim("llama_bf16.forward.json.gz").fields) - {
        "vocab_size"
    }
