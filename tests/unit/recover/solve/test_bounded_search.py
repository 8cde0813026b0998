"""Evidence that leaves nearly everything open: the search ends, and is never certain of what it did not examine."""

from dataclasses import replace

import msgspec
import pytest

from stepscope.explain.kernel_names import decode
from stepscope.recover.claims import claimed_run
from stepscope.recover.claims.verdict import ClaimVerdict
from stepscope.recover.claims.verification import verify
from stepscope.recover.evidence.observation import Observation, observe
from stepscope.recover.evidence.recording import KernelEvidence
from stepscope.recover.evidence.structure import find_structure
from stepscope.recover.facts import exactly
from stepscope.recover.shape import divisors
from stepscope.recover.solve import candidates, recovery, search
from stepscope.recover.solve.candidates import find_tokens, solve
from stepscope.recover.solve.priors import Effort
from stepscope.recover.solve.recovery import recover
from tests.unit.recover.claimed_runs import true_claim
from tests.unit.recover.evidence_runs import COUNTERS, TRACES, read_evidence, recovered, with_kernels
from tests.unit.recover.synthetic_runs import launch, model_of

GPT2 = "gpt2_bf16_odd.csv.gz"
SIZES = ("d_model", "num_heads", "num_kv_heads", "d_head", "d_ff", "vocab_size", "batch", "context")
# Names that show neither tiles nor grids: those of another vendor's libraries.
PRODUCT = "Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT64x16x128_MI16x16x1_SN"
ATTENTION = "attn_fwd"


def short_prompt(context: int = 5) -> KernelEvidence:
    """A short prompt through GEMMs and attention that do not show their sizes."""
    made = launch(replace(model_of(GPT2), batch=1, context=context), GPT2, counted=False)
    names = {"GEMM": decode(PRODUCT), "attention": decode(ATTENTION)}
    kernels = [msgspec.structs.replace(one, name=names.get(one.name.kernel_class, one.name)) for one in made.sightings]
    return replace(with_kernels(made, kernels), device_sms=None)


def observe_first(evidence: KernelEvidence) -> Observation:
    structure = find_structure(evidence.sightings)
    return observe(structure, structure.readings[0], evidence.device_sms)


def test_unused_effort_is_returned() -> None:
    effort = Effort(100)
    with effort.share(4) as part:
        assert part.afford(20)
        assert not part.afford(6)
        assert part.afford_some(10, 2) == 2
    assert effort.left == 76
    assert effort.is_spent


def test_a_limited_search_is_reported_as_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stored candidate costs effort, so the limit also bounds memory."""
    observation = observe_first(short_prompt())
    each = candidates._KEEPING + len(candidates.explainable(observation))
    afford_some, paid = Effort.afford_some, []

    def spy(self: Effort, number: int, units: int) -> int:
        found = afford_some(self, number, units)
        paid.append(found if units == each else 0)
        return found

    monkeypatch.setattr(Effort, "afford_some", spy)
    for units in (300_000, 3_000_000):
        paid.clear()
        solution = solve(observation, Effort(units))
        assert solution.is_spent
        assert solution.is_cut
        assert 0 < len(solution.consistent) == sum(paid) <= units // each


def test_a_search_never_exceeds_its_effort() -> None:
    for units in (0, 1, 100, 10_000, 1_000_000):
        effort = Effort(units)
        solve(observe_first(short_prompt()), effort)
        assert 0 <= effort.left <= units


def test_an_incomplete_search_is_certain_of_no_size() -> None:
    found = recover([short_prompt()])
    assert len(found.left_open) == 1
    assert found.left_open[0] in found.notes
    assert [name for name in SIZES if found.fields[name].certain] == []
    assert found.fields["num_layers"].certain
    assert found.num_consistent < 4_000_000


def test_an_incomplete_search_does_not_exclude_the_truth() -> None:
    truth = replace(model_of(GPT2), batch=1, context=5)
    fields = recover([short_prompt()], work=2_000_000).fields
    for name in SIZES:
        field = fields[name]
        assert field.low is not None
        assert field.low <= getattr(truth, name)
        assert field.high is None or getattr(truth, name) <= field.high


@pytest.mark.parametrize("work", [1_000, 100_000])
@pytest.mark.parametrize("file", [*COUNTERS, *TRACES])
def test_less_work_makes_no_more_fields_certain(file: str, work: int) -> None:
    whole, cut = recovered(file), recover([read_evidence(file)], work=work)
    certain = {name: field.value for name, field in cut.fields.items() if field.certain}
    assert certain == {name: whole.fields[name].value for name in certain if whole.fields[name].certain}
    assert cut.left_open or msgspec.structs.replace(cut, notes=()) == msgspec.structs.replace(whole, notes=())


@pytest.mark.parametrize("file", [*COUNTERS, *TRACES])
def test_recorded_runs_stay_far_below_the_work_limit(file: str) -> None:
    found = recover([read_evidence(file)], work=recovery._MOST_WORK // 4)
    assert found == recovered(file)


def test_without_any_work_sizes_are_open() -> None:
    found = recover([read_evidence(GPT2)], work=0)
    assert found.candidates == ()
    assert found.left_open
    assert not any("none fits" in note for note in found.notes)


def test_an_incomplete_search_of_one_file_excludes_nothing() -> None:
    """The attention in this trace leaves so much open that only the most common heads were examined."""
    counted, traced = (
        search.fit_file(read_evidence(f"held_llama.{kind}"), Effort(10**9)) for kind in ("csv.gz", "forward.json.gz")
    )
    mine, other = counted.fitted[0].solution, traced.fitted[0].solution
    assert other.is_cut
    unseen = set(mine.consistent.rows()) - set(other.consistent.rows())
    common = search._keep_common(mine, other, Effort(10**9))
    assert common is not None
    assert not common.is_cut
    assert unseen & set(common.consistent.rows())


def test_incomplete_searches_are_not_called_different_runs() -> None:
    files = [read_evidence(f"held_llama.{kind}") for kind in ("csv.gz", "forward.json.gz")]
    for work in (0, 10_000, 100_000, 1_000_000):
        assert recover(files, work=work).left_open


def test_impossibly_large_counts_are_not_tokens() -> None:
    """An overflow in a counter must not be factored into its divisors."""
    observation = observe_first(read_evidence("held_qwen2.csv.gz"))
    seen = [one for one in observation.zones["between"] if not one.is_rows]
    huge = tuple(replace(one, counts=(exactly(2**100 + 1), exactly(2**61 - 1))) for one in seen)
    effort = Effort(10**6)
    tokens = find_tokens(replace(observation, zones={**observation.zones, "between": huge, "middle": ()}), effort)
    assert tokens == []
    assert not effort.is_spent


def test_divisors_use_the_given_factors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(1) == [1]
    assert divisors(4, 6) == divisors(24)
    assert len(divisors(2**40, 2**40)) == 81


def test_many_odd_kernels_in_a_layer_count_as_work() -> None:
    """With thousands of different counts between the GEMMs, fewer candidates are compared with them."""
    made = short_prompt()
    odd = next(one for one in made.sightings if one.name.kernel_class == "elementwise")
    kernels = []
    for one in made.sightings:
        kernels.append(one)
        if one.name.kernel_class == "norm":
            kernels += [msgspec.structs.replace(odd, grid=(2 + i, 1, 1)) for i in range(4000)]
    found = recover([with_kernels(made, kernels[:20_000])], work=3_000_000)
    assert found.num_consistent * found.counts <= 3_000_000
    assert [name for name in SIZES if found.fields[name].certain] == []


def test_verify_cannot_tell_after_an_incomplete_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    claim = true_claim(GPT2, batch=None, context=None, d_ff=None, vocab_size=None)
    assert verify([read_evidence(GPT2)], claim).verdict is ClaimVerdict.CONSISTENT
    found = msgspec.structs.replace(recovered(GPT2), left_open=("too many",))
    monkeypatch.setattr(claimed_run, "recover", lambda _: found)
    result = verify([read_evidence(GPT2)], claim)
    assert result.verdict is ClaimVerdict.UNDECIDED
    assert any("too many" in one for one in result.missing)


def test_verify_can_refute_after_an_incomplete_search(monkeypatch: pytest.MonkeyPatch) -> None:
    found = msgspec.structs.replace(recovered(GPT2), left_open=("too many",))
    monkeypatch.setattr(claimed_run, "recover", lambda _: found)
    claim = true_claim(GPT2, batch=None, context=None, vocab_size=None, d_ff=1000)
    assert verify([read_evidence(GPT2)], claim).verdict is ClaimVerdict.REFUTED


def test_verify_cannot_tell_if_an_interpretation_was_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = true_claim(GPT2, d_ff=1000)
    assert verify([read_evidence(GPT2)], claim).verdict is ClaimVerdict.REFUTED
    monkeypatch.setattr(claimed_run, "_MOST_LAID_OUT", 1)
    result = verify([read_evidence(GPT2)], claim)
    assert result.verdict is ClaimVerdict.UNDECIDED
    assert result.refuted_by == ()
    assert {result.fields[name].verdict for name in SIZES} == {"not tested"}


def test_verify_tries_every_batch_that_divides_the_tokens() -> None:
    """A number of tokens with many divisors, and a batch that is not among the first ones."""
    model = replace(model_of(GPT2), batch=1680, context=3)
    claim = true_claim(GPT2, batch=None, context=None)
    result = verify([launch(model, GPT2)], claim)
    assert len(divisors(model.tokens)) > 48
    assert result.verdict is not ClaimVerdict.REFUTED
