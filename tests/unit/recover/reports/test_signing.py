"""Signed reports: every bit is checked, and a report is only returned if the expected key signed it."""

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from stepscope.errors import StepscopeError
from stepscope.recover.reports import signing
from stepscope.recover.reports.keys import PublicKey, load_private_key, parse_public_key, read_public_key
from stepscope.recover.reports.signed_report import HashedFile, SignedReport, canonical_bytes, parse_report
from stepscope.recover.reports.signing import (
    SignatureVerdict,
    check_evidence,
    check_signed,
    check_signed_bytes,
    sign_report,
    write_signed,
)
from tests.unit.recover.reports.signed_reports import STATEMENT, make_key, make_report, make_signed

GROUP_ORDER = 2**252 + 27742317777372353535851937790883648493
LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text() | st.floats(allow_nan=False)
PLAIN = st.recursive(
    LEAVES.filter(lambda one: one not in (float("inf"), float("-inf"))),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def sign_raw(content: bytes, key: Ed25519PrivateKey) -> bytes:
    """Return any bytes with a valid signature, as an attacker with a key could."""
    signature = base64.b64encode(key.sign(b"stepscope.report/1\n" + content))
    return b'{"report":' + content + b',"signature":"' + signature + b'"}\n'


def test_a_signed_report_round_trips(tmp_path: Path) -> None:
    signed, public = make_signed(tmp_path)
    check = check_signed_bytes(signed, public)
    assert check.verdict is SignatureVerdict.GOOD
    assert check.signer == public
    assert check.report == make_report(public_key=public.text)


def test_the_signed_file_is_json(tmp_path: Path) -> None:
    signed, public = make_signed(tmp_path)
    document = json.loads(signed)
    assert set(document) == {"report", "signature"}
    assert document["report"]["statement"] == STATEMENT
    assert document["report"]["public_key"] == public.text


def test_every_flipped_bit_is_detected(tmp_path: Path) -> None:
    signed, public = make_signed(tmp_path)
    for place in range(8 * len(signed)):
        changed = bytearray(signed)
        changed[place // 8] ^= 1 << place % 8
        check = check_signed_bytes(bytes(changed), public)
        assert check.verdict is SignatureVerdict.CHANGED, (
            f"bit {place % 8} of byte {place // 8}: {signed[place // 8 :][:20]!r}"
        )
        assert check.report is None


def test_truncated_and_appended_bytes_are_detected(tmp_path: Path) -> None:
    signed, public = make_signed(tmp_path)
    inner = signed.replace(b',"signature"', b',"more":1,"signature"')
    for changed in (signed[1:], signed[:-1], signed + b"\n", signed + b" ", b" " + signed, signed + signed, inner):
        assert check_signed_bytes(changed, public).verdict is SignatureVerdict.CHANGED
    told = signed.index(b"stepscope.report") + len(b"stepscope.report")
    for end in range(len(signed)):
        if end < told:
            with pytest.raises(StepscopeError, match="not a signed report"):
                check_signed_bytes(signed[:end], public)
        else:
            assert check_signed_bytes(signed[:end], public).verdict is SignatureVerdict.CHANGED


def test_a_reformatted_report_is_changed(tmp_path: Path) -> None:
    signed, public = make_signed(tmp_path)
    laid_out = msgspec.json.format(signed, indent=2)
    assert check_signed_bytes(laid_out, public).verdict is SignatureVerdict.CHANGED


@pytest.mark.parametrize("content", [b"", b"\0" * 500, b'{"report":{},"signature":""}\n', b"PK\x03\x04"])
def test_a_file_that_is_not_a_report_is_an_error(content: bytes, tmp_path: Path) -> None:
    _, public = make_key(tmp_path)
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(StepscopeError, match="not a signed report"):
        check_signed(tmp_path / "file", public.text)


def test_another_key_is_not_reported_as_a_change(tmp_path: Path) -> None:
    signed, public = make_signed(tmp_path)
    _, other = make_key(tmp_path, "b.key")
    check = check_signed_bytes(signed, other)
    assert check.verdict is SignatureVerdict.OTHER_KEY
    assert check.signer == public
    assert check.report is None


def test_a_signature_of_another_report_is_rejected(tmp_path: Path) -> None:
    signed, public = make_signed(tmp_path)
    path, _ = make_key(tmp_path, "b.key")
    other = sign_report(make_report(nonce="beef"), path)
    mixed = signed[: signed.rindex(b',"signature"')] + other[other.rindex(b',"signature"') :]
    assert check_signed_bytes(mixed, public).verdict is SignatureVerdict.CHANGED


def test_a_malleable_signature_is_rejected(tmp_path: Path) -> None:
    signed, public = make_signed(tmp_path)
    start = signed.rindex(b'"', 0, -3) + 1
    signature = base64.b64decode(signed[start:-3])
    s = int.from_bytes(signature[32:], "little") + GROUP_ORDER
    second = base64.b64encode(signature[:32] + s.to_bytes(32, "little"))
    assert check_signed_bytes(signed[:start] + second + signed[-3:], public).verdict is SignatureVerdict.CHANGED


def test_noncanonical_base64_is_rejected(tmp_path: Path) -> None:
    signed, public = make_signed(tmp_path)
    letters = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    last = signed[-6]  # followed by ==, "}, and a line break: its lower four bits are unused
    same_bytes = letters[letters.index(last) ^ 1]
    respelled = signed[:-6] + bytes([same_bytes]) + signed[-5:]
    original, other = (base64.b64decode(one[one.rindex(b'"', 0, -3) + 1 : -3]) for one in (signed, respelled))
    assert original == other
    assert check_signed_bytes(respelled, public).verdict is SignatureVerdict.CHANGED


def test_a_signature_without_the_prefix_is_rejected(tmp_path: Path) -> None:
    path, public = make_key(tmp_path)
    content = canonical_bytes(make_report(public_key=public.text))
    bare = base64.b64encode(load_private_key(path).sign(content))
    signed = b'{"report":' + content + b',"signature":"' + bare + b'"}\n'
    assert check_signed_bytes(signed, public).verdict is SignatureVerdict.CHANGED


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'{"claim":', b'{"also":1,"claim":'),
        (b'"bytes":3', b'"bytes":3,"bytes":4'),
        (b'"bytes":3', b'"bytes": 3'),
        (b'"bytes":3', b'"bytes":3.0'),
        (b'"nonce":"f00d"', b'"nonce":"\\u006600d"'),
        (b'"nonce":"f00d"', b'"nonce":7'),
        (b'"ratio":0.1', b'"ratio":0.10'),
        (b'"ratio":0.1', b'"ratio":NaN'),
        (b'"ratio":0.1', b'"ratio":1e999'),
        (b'"layers":12', b'"layers":' + b"9" * 30),
        (b'"layers":12', b'"layers":' + b"9" * 5000),
        (b'"layers":12', b'"layers":' + b"[" * 100_000 + b"]" * 100_000),
        (b"stepscope.report/1", b"stepscope.report/2"),
        ("naïve".encode(), b"na\xffve"),
        (b'{"claim":null,', b"{"),
    ],
)
def test_validly_signed_content_that_is_not_a_report_is_rejected(old: bytes, new: bytes, tmp_path: Path) -> None:
    path, public = make_key(tmp_path)
    content = canonical_bytes(make_report(public_key=public.text))
    assert content.count(old) == 1
    with pytest.raises(StepscopeError, match="not a report in this version's format"):
        check_signed_bytes(sign_raw(content.replace(old, new), load_private_key(path)), public)


def test_a_second_report_in_the_signed_bytes_is_rejected(tmp_path: Path) -> None:
    path, public = make_key(tmp_path)
    content = canonical_bytes(make_report(public_key=public.text))
    with pytest.raises(StepscopeError, match="not a report in this version's format"):
        check_signed_bytes(sign_raw(content + b',"report":' + content, load_private_key(path)), public)


def test_a_report_that_names_a_different_key_is_rejected(tmp_path: Path) -> None:
    path, public = make_key(tmp_path)
    _, other = make_key(tmp_path, "b.key")
    content = canonical_bytes(make_report(public_key=other.text))
    with pytest.raises(StepscopeError, match="names a different key"):
        check_signed_bytes(sign_raw(content, load_private_key(path)), public)


def test_the_canonical_form_does_not_depend_on_the_order_of_keys() -> None:
    forwards, backwards = dict(STATEMENT), dict(reversed(list(STATEMENT.items())))
    assert list(forwards) != list(backwards)
    assert canonical_bytes(make_report(statement=forwards)) == canonical_bytes(make_report(statement=backwards))


def test_the_canonical_form_is_stable() -> None:
    report = make_report(public_key="k", statement={"b": 1e22, "a": [0.1, -0.0, 2**53 + 1]}, gpus=())
    assert canonical_bytes(report) == (
        b'{"claim":null,"evidence":[{"bytes":3,"name":"trace.json","sha256":"' + b"ab" * 32 + b'"}],"gpus":[],'
        b'"nonce":"f00d","public_key":"k","schema":"stepscope.report/1","signed_at":"2026-01-02T03:04:05Z",'
        b'"statement":{"a":[0.1,-0.0,9007199254740993],"b":1e+22},"stepscope":"0.1.0","weights":null}'
    )


def test_unicode_is_not_normalized() -> None:
    one, two = (canonical_bytes(make_report(statement={letter: 1})) for letter in ("\u00e9", "e\u0301"))
    assert one != two
    assert parse_report(two).statement == {"e\u0301": 1}


@given(st.dictionaries(st.text(), PLAIN, max_size=4))
def test_any_statement_round_trips(statement: dict[str, Any]) -> None:
    report = make_report(statement=statement)
    content = canonical_bytes(report)
    assert canonical_bytes(parse_report(content)) == content
    assert parse_report(content) == report


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), 2**63, -(2**63) - 1, {1: "a"}, "\ud800", object, [{"a": float("-inf")}]]
)
def test_a_statement_without_a_canonical_form_raises(value: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        canonical_bytes(make_report(statement={"value": value}))


def test_weak_keys_are_rejected() -> None:
    base_point = (4 * pow(5, -1, 2**255 - 19) % (2**255 - 19)).to_bytes(32, "little")
    neutral = PublicKey((1).to_bytes(32, "little"))
    # One signature that is valid for all messages: the library accepts it.
    Ed25519PublicKey.from_public_bytes(neutral.raw).verify(base_point + (1).to_bytes(32, "little"), b"whatever")
    order_8 = "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"
    other_8 = "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"
    ys = [0, 1, 2**255 - 20, 2**255 - 19, 2**255 - 18]
    raws = [y.to_bytes(32, "little") for y in ys] + [bytes.fromhex(order_8), bytes.fromhex(other_8)]
    for raw in raws + [raw[:31] + bytes([raw[31] | 0x80]) for raw in raws]:
        with pytest.raises(StepscopeError, match="weak"):
            parse_public_key(PublicKey(raw).text)


def test_a_public_key_has_one_valid_form(tmp_path: Path) -> None:
    _, public = make_key(tmp_path)
    assert parse_public_key(public.text) == public
    spare = public.text[:-2] + chr(ord(public.text[-2]) + 1) + "="
    for text in (public.text[:-1], public.text + "=", spare, public.text.removeprefix("ed25519:"), "ed25519:", ""):
        with pytest.raises(StepscopeError, match="not a public key"):
            parse_public_key(text)


def test_a_private_key_passed_as_public_is_not_shown(tmp_path: Path) -> None:
    path, public = make_key(tmp_path)
    with pytest.raises(StepscopeError, match="is a private key") as caught:
        read_public_key(path)
    assert path.read_text().splitlines()[1] not in str(caught.value)
    assert read_public_key(tmp_path / "a.key.pub") == read_public_key(public.text) == public


def test_writing_overwrites_only_with_force(tmp_path: Path) -> None:
    path, public = make_key(tmp_path)
    target = tmp_path / "new" / "report.json"
    write_signed(target, make_report(), path)
    with pytest.raises(StepscopeError, match="exists"):
        write_signed(target, make_report(nonce=None), path)
    assert _read(target, public).nonce == "f00d"
    write_signed(target, make_report(nonce=None), path, force=True)
    assert _read(target, public).nonce is None


def test_an_oversized_report_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signed, public = make_signed(tmp_path)
    (tmp_path / "report").write_bytes(signed)
    monkeypatch.setattr(signing, "_LARGEST_BYTES", len(signed) - 1)
    with pytest.raises(StepscopeError, match="larger than"):
        check_signed(tmp_path / "report", public.text)


def test_files_are_compared_with_the_report(tmp_path: Path) -> None:
    from stepscope.recover.reports.signed_report import hash_files

    trace, folder = tmp_path / "trace.json", tmp_path / "run"
    (folder / "deep").mkdir(parents=True)
    for file, content in ((trace, "a"), (folder / "x", "b"), (folder / "deep" / "y", "c"), (tmp_path / "z", "d")):
        file.write_text(content)
    report = make_report(evidence=hash_files([trace, folder]))
    assert check_evidence(report, [trace, folder]) == []
    assert check_evidence(report, [trace.rename(tmp_path / "renamed")]) == []
    assert _problems(report, [tmp_path / "z"]) == [("z", "not in the report")]
    trace.write_text("A")
    (folder / "x").write_text("c")  # the bytes of another file in the directory
    (folder / "deep" / "y").unlink()
    (folder / "w").write_text("b")
    assert _problems(report, [trace, folder]) == [
        ("trace.json", "changed"),
        ("run/w", "not in the report"),
        ("run/x", "changed"),
        ("run/deep/y", "missing"),
    ]


def _problems(report: SignedReport, paths: list[Path]) -> list[tuple[str, str]]:
    return [(one.name, one.problem) for one in check_evidence(report, paths)]


def _read(path: Path, public: PublicKey) -> SignedReport:
    report = check_signed(path, public.text).report
    assert report is not None
    return report


def test_reports_do_not_contain_directories(tmp_path: Path) -> None:
    from stepscope.recover.reports.signed_report import hash_files

    (tmp_path / "trace").write_text("a")
    (hashed,) = hash_files([tmp_path / "trace"])
    assert hashed == HashedFile(
        name="trace", bytes=1, sha256="ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"
    )
