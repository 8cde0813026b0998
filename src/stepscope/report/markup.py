"""A table as Markdown for GitHub and as LaTeX with booktabs.

Both are written here rather than by `tabulate`, which passes `|`, `<` and `*` through in Markdown, so that
a C++ kernel name loses its template arguments, and which writes no booktabs caption, notes or column of
right-aligned numbers with units.
"""

import re
from collections.abc import Callable, Sequence

from rich.cells import cell_len

from stepscope.report.numbers import MISSING
from stepscope.report.sheet import Sheet

# An underscore inside a word is plain in GitHub Markdown, and `step\_ms` is hard to read in the source.
_MD_SPECIAL = re.compile(r"[\\`*\[\]<>|&~$]|(?<![^\W_])_|_(?![^\W_])")
# At the start of a line these would open a heading or a list.
_MD_BLOCK = re.compile(r"^(\d*)([#+\-=.)])")

_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "%": r"\%",
    "_": r"\_",
    "&": r"\&",
    "#": r"\#",
    "$": r"\$",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",  # \textquotedbl would need the T1 encoding
    "`": r"\textasciigrave{}",
    # After `\\` at the end of a row, LaTeX takes these two for its arguments.
    "[": "{[}",
    "*": "{*}",
    # Not `--` and `---`, which a hyphen next to them would turn into another dash.
    "–": r"\textendash{}",
    "—": r"\textemdash{}",
    "−": "$-$",
    "×": r"$\times$",
    "±": r"$\pm$",
    "µ": r"$\mu$",
    "μ": r"$\mu$",
    "·": r"$\cdot$",
    "≈": r"$\approx$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "→": r"$\rightarrow$",
    "∞": r"$\infty$",
    "²": r"$^2$",
    "³": r"$^3$",
    "°": r"$^\circ$",
    "…": r"\ldots{}",
    "\N{REPLACEMENT CHARACTER}": "?",
}
_LATEX_SPECIAL = re.compile("|".join([r"(?<=-)-", *map(re.escape, _LATEX)]))
_NEGATIVE = re.compile(r"^-(?=\d)")


def render_markdown(sheet: Sheet) -> str:
    """A GitHub table. The source is padded too: it is also read in diffs and editors."""
    labels = [_escape_markdown(lane.label) for lane in sheet.lanes]
    rows = [[_escape_markdown(cell) for cell in row] for row in sheet.rows]
    widths = [max(3, *map(cell_len, column)) for column in zip(labels, *rows, strict=True)]
    right = [not lane.is_text for lane in sheet.lanes]
    rule = ["-" * (width - 1) + ":" if r else "-" * width for width, r in zip(widths, right, strict=True)]
    lines = [_markdown_row(row, widths, right) for row in (labels, rule, *rows)] if labels else []
    notes = ["- " + _MD_BLOCK.sub(r"\1\\\2", _escape_markdown(note)) for note in sheet.notes]
    title = f"**{_escape_markdown(sheet.title)}**" if sheet.title else ""
    return _join_parts([title, "\n".join(lines), "\n".join(notes)])


def _join_parts(parts: Sequence[str]) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"


def _markdown_row(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    padded = []
    for cell, width, is_right in zip(cells, widths, right, strict=True):
        space = " " * (width - cell_len(cell))
        padded.append(space + cell if is_right else cell + space)
    return f"| {' | '.join(padded)} |"


def _escape_markdown(text: str) -> str:
    return _MD_SPECIAL.sub(r"\\\g<0>", text)


def render_latex(sheet: Sheet) -> str:
    """A complete floating `table`; the document needs `\\usepackage{booktabs}` and nothing else."""
    body = [_latex_row(row, _latex_cell) for row in sheet.rows]
    spec = "".join("l" if lane.is_text else "r" for lane in sheet.lanes) or "l"
    lines = [
        r"% needs \usepackage{booktabs}",
        r"\begin{table}[htbp]",
        r"  \centering",
        rf"  \caption{{{_escape_latex(sheet.title)}}}",
        rf"  \begin{{tabular}}{{{spec}}}",
        r"    \toprule",
        _latex_row([lane.label for lane in sheet.lanes], _escape_latex),
        r"    \midrule",
        *body,
        r"    \bottomrule",
        r"  \end{tabular}",
        *(rf"  \par{{\footnotesize {_escape_latex(note)}\par}}" for note in sheet.notes),
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _latex_row(cells: Sequence[str], escape: Callable[[str], str]) -> str:
    return f"    {' & '.join(map(escape, cells))} \\\\"


def _latex_cell(cell: str) -> str:
    """A cell; a negative number gets a minus sign, where escaping alone leaves a hyphen."""
    if cell == MISSING:
        return "--"
    return _NEGATIVE.sub("$-$", _escape_latex(cell))


def _escape_latex(text: str) -> str:
    # `--` is an en dash in LaTeX: `{}` between the hyphens keeps `--compile` readable.
    return _LATEX_SPECIAL.sub(lambda match: _LATEX.get(match[0], "{}-"), text)
