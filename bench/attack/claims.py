"""False claims about genuine files, files that belong to another run, and what cannot be detected."""

from collections.abc import Sequence
from typing import Any

from attack.documents import read_document
from attack.forgery import COUNTERS, FORWARD, TRACES, Family, redraw, renumber
from attack.layers import copied_each_renumbered, is_close, other_run
from attack.names import other_dtype_in_counters
from attack.subject import Forged, Subject
from recovery import FIXTURES
from stepscope.recording.readers.formats import open_recording
from stepscope.recover.evidence.recording import gather
from stepscope.recover.solve.recovery import recover

CLAIMS = Family("false claims")
OTHER_FILES = Family("files of other runs")
INVENTED = Family("invented evidence")


def _claim(subject: Subject, **claimed: Any) -> Forged:
    return subject.forge(subject.launches, **claimed)


@CLAIMS.add("One layer more than there is.")
def claim_more_layers(subject: Subject) -> Forged:
    return _claim(subject, num_layers=subject.truth["num_layers"] + 1)


@CLAIMS.add("One layer fewer than there is.")
def claim_fewer_layers(subject: Subject) -> Forged:
    return _claim(subject, num_layers=subject.truth["num_layers"] - 1)


@CLAIMS.add("Twice the d_model, with twice the heads.")
def claim_d_model(subject: Subject) -> Forged:
    sizes = {name: 2 * subject.truth[name] for name in ("d_model", "num_heads", "num_kv_heads")}
    return _claim(subject, **sizes, d_head=subject.truth["d_head"])


@CLAIMS.add("Twice the heads, of half the size.")
def claim_heads(subject: Subject) -> Forged:
    heads, kv_heads, width = (subject.truth[name] for name in ("num_heads", "num_kv_heads", "d_head"))
    return _claim(subject, num_heads=2 * heads, num_kv_heads=2 * kv_heads, d_head=width // 2)


@CLAIMS.add("Another number of key-value heads.")
def claim_kv_heads(subject: Subject) -> Forged | None:
    heads, kv_heads = subject.truth["num_heads"], subject.truth["num_kv_heads"]
    wrong = heads if kv_heads != heads else heads // 2
    if heads % wrong:
        return None
    return _claim(subject, num_heads=heads, d_head=subject.truth["d_head"], num_kv_heads=wrong)


@CLAIMS.add("One and a half times the d_ff.")
def claim_d_ff(subject: Subject) -> Forged:
    return _claim(subject, d_ff=3 * subject.truth["d_ff"] // 2)


@CLAIMS.add("Twice the vocab_size.")
def claim_vocab_size(subject: Subject) -> Forged:
    return _claim(subject, vocab_size=2 * subject.truth["vocab_size"])


@CLAIMS.add("A vocab_size that would be right if the LM head ran on the last token of each sequence only.")
def claim_head_on_last_token(subject: Subject) -> Forged:
    return _claim(subject, vocab_size=subject.truth["vocab_size"] * subject.truth["context"])


@CLAIMS.add("The vocab_size that recovery considers possible and that is farthest off, by a factor of two or more.")
def claim_possible_vocab_size(subject: Subject) -> Forged | None:
    found = recover([gather(open_recording(subject.document.path))]).fields["vocab_size"]
    listed = [size for size in (found.low, found.high, *found.alternatives) if isinstance(size, int)]
    truth = subject.truth["vocab_size"]
    farthest = max(listed, key=lambda size: abs(size - truth), default=truth)
    is_far = not truth / 2 < farthest < 2 * truth  # `verify` lists what is nearer
    return _claim(subject, vocab_size=farthest) if is_far else None


@CLAIMS.add("Batch and context in each other's place.")
def claim_batch_as_context(subject: Subject) -> Forged:
    return _claim(subject, batch=subject.truth["context"], context=subject.truth["batch"])


@CLAIMS.add("Twice the batch.")
def claim_batch(subject: Subject) -> Forged:
    return _claim(subject, batch=2 * subject.truth["batch"], context=subject.truth["context"])


@CLAIMS.add("Twice the context.")
def claim_context(subject: Subject) -> Forged:
    return _claim(subject, context=2 * subject.truth["context"], batch=subject.truth["batch"])


@CLAIMS.add("Twice the batch at half the context.")
def claim_batch_for_context(subject: Subject) -> Forged | None:
    context = subject.truth["context"]
    return None if context % 2 else _claim(subject, batch=2 * subject.truth["batch"], context=context // 2)


@CLAIMS.add("Another dtype.")
def claim_dtype(subject: Subject) -> Forged:
    others = {"bf16": "fp16", "fp16": "bf16", "fp32": "tf32", "tf32": "fp32"}
    return _claim(subject, dtype=others[subject.truth["dtype"]])


@CLAIMS.add("A gate in the feed-forward layer that is not there, or none where there is one.")
def claim_gated(subject: Subject) -> Forged:
    return _claim(subject, gated=not subject.is_gated)


@CLAIMS.add("A gate, with two thirds of the d_ff.")
def claim_gated_for_d_ff(subject: Subject) -> Forged | None:
    return None if subject.is_gated else _claim(subject, gated=True, d_ff=2 * subject.truth["d_ff"] // 3)


@CLAIMS.add("An LM head that shares the embedding's weights, or that does not, whichever is wrong.")
def claim_tied(subject: Subject) -> Forged:
    return _claim(subject, tied=not subject.is_tied)


@CLAIMS.add("One and a half times the parameters.", kinds=TRACES)
def claim_parameters(subject: Subject) -> Forged:
    return _claim(subject, parameters=3 * subject.truth["parameters"] // 2)


@CLAIMS.add(
    "1,000 parameters more than there are.",
    kinds=TRACES,
    undetectable="an optimizer's grid shows its parameters to within blocks of 65,536; what passes is listed",
)
def claim_parameters_nearly(subject: Subject) -> Forged:
    return _claim(subject, parameters=subject.truth["parameters"] + 1000)


@CLAIMS.add("The sizes of a larger model of the same family, about an untouched file.")
def claim_published_model(subject: Subject) -> Forged:
    sizes = {"num_layers": 32, "d_model": 4096, "num_heads": 32, "num_kv_heads": 32, "d_head": 128, "d_ff": 11008}
    return _claim(subject, **sizes, vocab_size=32000)


@CLAIMS.add("The sizes and the layers of a larger model, without batch and context.")
def claim_without_tokens(subject: Subject) -> Forged:
    sizes = {name: 2 * subject.truth[name] for name in ("d_model", "num_heads", "num_kv_heads", "d_ff")}
    return _claim(subject, **sizes, d_head=subject.truth["d_head"], batch=None, context=None)


@CLAIMS.add(
    "A d_ff that is one smaller, within the same tile.",
    undetectable="a GEMM computes whole tiles; values in a tile that pass are listed with the verdict",
)
def claim_d_ff_within_tile(subject: Subject) -> Forged:
    return _claim(subject, d_ff=subject.truth["d_ff"] - 1)


# --- Files of other runs


def _snapshots(subject: Subject) -> Sequence[str]:
    return [name for name in ("gpt2_fp32_efficient", "llama_bf16") if name != subject.run]


@OTHER_FILES.add("The memory snapshot is that of another run.")
def snapshot_of_another_run(subject: Subject) -> Forged:
    path = FIXTURES / f"{_snapshots(subject)[0]}.snapshot.pickle.gz"
    forged = _claim(subject)
    return Forged(files=(*forged.files, (path.name, path.read_bytes())), claim=forged.claim)


@OTHER_FILES.add("A memory snapshot of another run, whose vocab_size is claimed.")
def vocab_size_of_another_snapshot(subject: Subject) -> Forged | None:
    name = _snapshots(subject)[0]
    vocab_size = {"gpt2_fp32_efficient": 50257, "llama_bf16": 32000}[name]
    if is_close(vocab_size, subject.truth["vocab_size"]):
        return None
    forged = snapshot_of_another_run(subject)
    return Forged(files=forged.files, claim={**forged.claim, "vocab_size": vocab_size})


def _partner(subject: Subject) -> tuple[str, bytes] | None:
    """Return the trace of the same run and depth, for counters."""
    path = FIXTURES / f"{subject.run}.forward.json.gz"
    if not path.is_file() or subject.truth["num_layers"] != subject.truth["traced_layers"]:
        return None
    document = read_document(path)
    return document.file, document.write()


def _with_partner(subject: Subject, forged: Forged | None) -> Forged | None:
    partner = _partner(subject)
    return Forged(files=(*forged.files, partner), claim=forged.claim) if forged and partner else None


@OTHER_FILES.add("Counters with copied layers and a genuine trace of the same run.", kinds=COUNTERS)
def copied_counters_with_trace(subject: Subject) -> Forged | None:
    return _with_partner(subject, copied_each_renumbered(subject))


@OTHER_FILES.add("Counters with renamed dtypes and a genuine trace of the same run.", kinds=COUNTERS)
def renamed_counters_with_trace(subject: Subject) -> Forged | None:
    return _with_partner(subject, other_dtype_in_counters(subject))


@OTHER_FILES.add("Genuine counters and the trace of another run with the same number of layers.", kinds=COUNTERS)
def trace_of_another_run(subject: Subject) -> Forged | None:
    names = {1: "", 2: "llama_ours", 3: "held_neox", 4: "gpt2_bf16_odd", 5: ""}
    name = names[subject.truth["num_layers"]]
    if not name or name == subject.run:
        return None
    document = read_document(FIXTURES / f"{name}.forward.json.gz")
    forged = _claim(subject)
    return Forged(files=(*forged.files, (document.file, document.write())), claim=forged.claim)


@OTHER_FILES.add(
    "Counters of a shallower model of the same sizes, and a genuine trace of the claimed one.", kinds=COUNTERS
)
def counters_of_a_shallower_run(subject: Subject) -> Forged | None:
    path = FIXTURES / f"{subject.run}.forward.json.gz"
    layers = subject.truth["traced_layers"]
    if not path.is_file() or subject.truth["num_layers"] == layers:
        return None
    document = read_document(path)
    forged = _claim(subject, num_layers=layers)
    return Forged(files=(*forged.files, (document.file, document.write())), claim=forged.claim)


@OTHER_FILES.add("A file of another run of the same kind, and nothing but the number of layers is claimed.")
def two_runs_bare_claim(subject: Subject) -> Forged:
    other = other_run(subject)
    forged = _claim(subject)
    claim = {"num_layers": subject.truth["num_layers"]}
    return Forged(files=(*forged.files, (f"other.{other.file}", other.write())), claim=claim)


@OTHER_FILES.add("The same file twice, and twice the layers are claimed.")
def file_twice(subject: Subject) -> Forged:
    forged = _claim(subject, num_layers=2 * subject.truth["num_layers"])
    (name, content), *_ = forged.files
    return Forged(files=(*forged.files, (f"again.{name}", content)), claim=forged.claim)


# --- Invented evidence


@INVENTED.add(
    "A file that no GPU wrote: every number that varies was drawn again.",
    undetectable="a forger can compute every number that we can predict; only who collected the file can vouch for it",
)
def invented_file(subject: Subject) -> Forged:
    return subject.forge(renumber(redraw(subject.launches, subject.name)))


@INVENTED.add(
    "An old recording is passed off as new.",
    undetectable="a file has no date that cannot be edited; let a nonce decide batch and context, which the file shows",
)
def replayed_file(subject: Subject) -> Forged:
    return _claim(subject)


@INVENTED.add(
    "The weights are random.",
    kinds=FORWARD,
    undetectable="no counter depends on the values of weights; all files here are from models with random weights",
)
def random_weights(subject: Subject) -> Forged:
    return _claim(subject)


@INVENTED.add(
    "A smaller model is padded with zeros to the claimed sizes.",
    undetectable="the work is that of the claimed model, whatever the matrices contain",
)
def zero_padding(subject: Subject) -> Forged:
    return _claim(subject)
