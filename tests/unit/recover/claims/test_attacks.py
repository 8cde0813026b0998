"""The red team: what it makes of real evidence, and what a few files withstand. `bench/attacks.py` tries everything."""

import gzip
import json
import time
from pathlib import Path

import pytest

from attack.crew import work_through
from attack.documents import read_document
from attack.forgery import TRAINING
from attack.scoreboard import listed_forgeries
from attack.subject import find_files, open_subject
from attack.trial import FORGERIES, admit, attack, find_untested, honest_claims
from recovery import FIXTURES

COUNTERS = "gpt2_bf16_odd.csv.gz"
TRACE = "gpt2_fp32_efficient.forward.json.gz"
STEP = "held_gpt2_fp16.train.json.gz"
PAGE = Path(__file__).parents[4] / "docs" / "trust.md"
CAUGHT = ("spliced runs", "reordered kernels", "scaled counters", "signed reports", "large numbers", "false claims")
ELSEWHERE = ("claim-tied", "many-layers", "claim-possible-vocab-size")  # not with these files, or slow
DETECTED = [
    name
    for name, one in FORGERIES.items()
    if one.family in CAUGHT and one.promise == "detected" and name not in ELSEWHERE
]
# Forgeries that change neither the file nor the claim: what they hide is not in the evidence.
UNCHANGED = {"idle-layers", "replayed-file", "random-weights", "zero-padding"}


def test_the_docs_list_every_forgery() -> None:
    expected = {name: (one.promise, one.family, one.sentence) for name, one in FORGERIES.items()}
    assert listed_forgeries(PAGE) == expected


def test_there_are_many_forgeries_and_arguments() -> None:
    assert len(FORGERIES) > 100
    assert len({(one.sentence, one.promise) for one in FORGERIES.values()}) == len(FORGERIES)
    assert {"copied layers", "renamed kernels", "invented evidence"} <= {one.family for one in FORGERIES.values()}


@pytest.mark.parametrize("file", [COUNTERS, TRACE])
def test_a_file_that_nobody_edits_stays_the_same(file: str) -> None:
    text = gzip.decompress((FIXTURES / file).read_bytes()).decode()
    written = read_document(FIXTURES / file).write().decode()
    if file == COUNTERS:
        assert written == text
    else:
        kernels = [event for event in json.loads(text)["traceEvents"] if event["cat"] == "kernel"]
        assert json.loads(written)["traceEvents"][: len(kernels)] == kernels


def test_every_layer_of_every_run_is_found() -> None:
    for path in find_files():
        subject = open_subject(path, lambda *_: ())
        layers = subject.truth["num_layers"]
        assert {one.layers for one in subject.regions} <= {layers, layers - 1}, path.name
        assert subject.forward.end <= subject.head, path.name


@pytest.mark.parametrize("file", [COUNTERS, TRACE, STEP])
def test_every_forgery_changes_something(file: str) -> None:
    subject = open_subject(FIXTURES / file, find_untested)
    genuine = subject.forge(subject.launches)
    made = [
        name
        for name, one in FORGERIES.items()
        if subject.kind in one.kinds and (forged := one.forge(subject)) is not None and forged == genuine
    ]
    assert set(made) <= UNCHANGED


@pytest.mark.parametrize("file", [COUNTERS, TRACE])
def test_no_true_claim_is_refuted(file: str) -> None:
    path = FIXTURES / file
    subject = open_subject(path, find_untested)
    verdicts = {claim: admit(claim, path).outcome for claim in honest_claims(subject)}
    assert len(verdicts) > 20
    assert verdicts["tested fields"] == "consistent"
    assert set(verdicts.values()) <= {"consistent", "cannot tell"}


@pytest.mark.parametrize("name", DETECTED)
def test_a_forgery_does_not_pass(name: str) -> None:
    files = (STEP,) if FORGERIES[name].kinds == TRAINING else (COUNTERS, TRACE)
    tried = [trial for file in files if (trial := attack(name, FIXTURES / file)) is not None]
    assert tried
    assert {trial.outcome for trial in tried} <= {"refuted", "cannot tell", "rejected"}


@pytest.mark.parametrize("file", ["neox_fp16.train.json.gz", "llama_compiled.train.json.gz"])
def test_an_optimizer_does_not_update_copied_layers(file: str) -> None:
    """In the second file, d_ff cannot be tested and is not claimed."""
    trial = attack("copied-step-redrawn", FIXTURES / file)
    assert trial is not None
    assert trial.outcome == "cannot tell"
    assert "the optimizer" in trial.why


@pytest.mark.parametrize("name", ["copied-each-redrawn", "fewer-layers-twice", "invented-file"])
@pytest.mark.parametrize("file", [COUNTERS, TRACE])
def test_numbers_that_are_drawn_again_pass(name: str, file: str) -> None:
    """A forger who is careful cannot be found out, so a table that says otherwise would mislead."""
    trial = attack(name, FIXTURES / file)
    assert trial is not None
    assert trial.outcome == "consistent", trial.why


def _obey(order: str) -> str:
    if order == "work":
        began = time.process_time()
        while time.process_time() < began + 600:
            pass
    if order == "die":
        raise SystemExit(3)
    return order.upper()


def test_a_task_that_does_not_end_is_given_up_and_the_others_finish() -> None:
    finished = dict(
        work_through(["a", "work", "die", "b"], _obey, jobs=1, most_seconds=1, most_bytes=2**40, title="orders")
    )
    assert finished == {"a": "A", "work": "too slow", "die": "crashed", "b": "B"}
