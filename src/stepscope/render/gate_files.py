"""The result of the gate for a pull request: Markdown for GitHub, and JUnit XML for any CI that shows test reports."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from stepscope.explain.gate.gate_tables import gate_tables
from stepscope.explain.gate.verdict import GateResult, Outcome
from stepscope.files import check_target, write_atomically, writing
from stepscope.render.formats import Format, clean
from stepscope.render.markup import escape_markdown
from stepscope.render.tables import render_all

_HEADLINES: dict[Outcome, str] = {
    "pass": "✅ stepscope: no regression",
    "fail": "❌ stepscope: regression",
    "cannot tell": "⚠️ stepscope: cannot be decided",
}
_LONGEST_MESSAGE = 2_000
# XML 1.0 has no way to write these, escaped or not.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_markdown(result: GateResult) -> str:
    """A verdict line, the tables, and what is known about the noise."""
    headline = _HEADLINES[result.outcome] if result.limit is not None or result.refusals else "stepscope: comparison"
    verdicts = "".join(f"- {escape_markdown(clean(one, _LONGEST_MESSAGE))}\n" for one in result.sentences)
    return f"### {headline}\n\n{verdicts}\n{render_all(gate_tables(result), Format.MD)}\n"


def write_junit(result: GateResult) -> bytes:
    """One test case per metric. A metric that cannot be decided is an error, as in a test that could not run."""
    cases: list[tuple[str, Outcome, str]] = [
        (one.metric, one.outcome, one.sentence(result.limit)) for one in result.metrics
    ]
    if result.refusals:
        cases = [("conditions", "cannot tell", result.sentences[0])]
    failures = sum(outcome == "fail" for _, outcome, _ in cases)
    errors = sum(outcome == "cannot tell" for _, outcome, _ in cases)
    counts = {"tests": str(len(cases)), "failures": str(failures), "errors": str(errors), "skipped": "0"}
    root = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(root, "testsuite", {"name": "stepscope", **counts, "time": "0"})
    for name, outcome, sentence in cases:
        names = {"classname": f"stepscope.{result.name}", "name": name, "time": "0"}
        case = ElementTree.SubElement(suite, "testcase", names)
        said = _only_xml(clean(sentence, _LONGEST_MESSAGE))
        if outcome != "pass":
            tag = "failure" if outcome == "fail" else "error"
            kind = {"message": said, "type": "regression" if outcome == "fail" else "undecided"}
            ElementTree.SubElement(case, tag, kind).text = _only_xml("\n".join(result.notes))
        ElementTree.SubElement(case, "system-out").text = said
    document: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return document + b"\n"


def check_files(paths: Sequence[tuple[str, Path | None]]) -> None:
    """Raise StepscopeError for a file that could not be written later. The reports of an earlier run are replaced, as
    CI tools expect."""
    for flag, path in paths:
        if path is not None and not _is_step_summary(path):
            check_target(path, force=True, flag=flag)


def save_summary(result: GateResult, path: Path) -> None:
    """Write the Markdown. It is appended to the file that GitHub shows on the page of a job."""
    text = write_markdown(result)
    with writing(path, if_full="nothing was written", hint="--summary FILE"):
        if _is_step_summary(path):
            with path.open("a", encoding="utf-8") as file:
                file.write(text)
        else:
            write_atomically(path, text.encode())


def save_junit(result: GateResult, path: Path) -> None:
    with writing(path, if_full="nothing was written", hint="--junit FILE"):
        write_atomically(path, write_junit(result))


def _is_step_summary(path: Path) -> bool:
    named = os.environ.get("GITHUB_STEP_SUMMARY")
    return bool(named) and Path(named or "").resolve() == path.resolve()


def _only_xml(text: str) -> str:
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)
