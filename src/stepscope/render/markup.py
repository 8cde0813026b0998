"""A table as GitHub Markdown and as LaTeX with booktabs.

Not written by `tabulate`: it does not escape `|`, `<` and `*` in Markdown, so that a C++ kernel name loses its template
arguments, and it has no booktabs caption, no notes, and no right-aligned numbers with units.
"""

import re
from collections.abc import Callable, Sequence

from rich.cells import cell_len

from stepscope.render.numbers import MISSING, Lane, Sheet

# An underscore inside a word is plain in GitHub Markdown, and `step\_ms` is hard to read in the source.
_MD_SPECIAL = re.compile(r"[\\`*\[\]<>|&~$]|(?<![^\W_])_|_(?![^\W_])")
# At the start of a line these would start a heading or a list.
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
    # After `\\` at the end of a row, LaTeX reads these two as its arguments.
    "[": "{[}",
    "*": "{*}",
    # Not `--` and `---`: next to a hyphen they would become another dash.
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
# Letters and quotes that the default font has too.
_LATIN = frozenset("ÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÑÒÓÔÕÖØÙÚÛÜÝàáâãäåæçèéêëìíîïñòóôõöøùúûüýÿß‘’“”")
_LATEX_SPECIAL = re.compile("|".join([r"(?<=-)-", *map(re.escape, _LATEX)]))
# Longer text is a sentence, not a name. If a table is too wide, long names become paragraphs too.
_LONG, _NAME = 45, 21
# How to set a table that is too wide, and how many characters then fit a line of an article.
_SIZES = (("", 70), (r"\small\setlength{\tabcolsep}{3pt}", 90), (r"\scriptsize\setlength{\tabcolsep}{3pt}", 118))
_NEGATIVE = re.compile(r"^-(?=\d)")


def render_markdown(sheet: Sheet) -> str:
    """Return a GitHub table. The source is padded, because it is also read in diffs and editors."""
    labels = [escape_markdown(lane.label) for lane in sheet.lanes]
    rows = [[escape_markdown(cell) for cell in row] for row in sheet.rows]
    widths = [max(3, *map(cell_len, column)) for column in zip(labels, *rows, strict=True)]
    right = [not lane.is_text for lane in sheet.lanes]
    rule = ["-" * (width - 1) + ":" if r else "-" * width for width, r in zip(widths, right, strict=True)]
    lines = [_markdown_row(row, widths, right) for row in (labels, rule, *rows)] if labels else []
    notes = ["- " + _MD_BLOCK.sub(r"\1\\\2", escape_markdown(note)) for note in sheet.notes]
    title = f"**{escape_markdown(sheet.title)}**" if sheet.title else ""
    return _join_parts([title, "\n".join(lines), "\n".join(notes)])


def _join_parts(parts: Sequence[str]) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"


def _markdown_row(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    padded = []
    for cell, width, is_right in zip(cells, widths, right, strict=True):
        space = " " * (width - cell_len(cell))
        padded.append(space + cell if is_right else cell + space)
    return f"| {' | '.join(padded)} |"


def escape_markdown(text: str) -> str:
    return _MD_SPECIAL.sub(r"\\\g<0>", text)


def render_latex(sheet: Sheet) -> str:
    """Return a complete floating `table`; the document only needs `\\usepackage{booktabs}`.

    A column of long text becomes a column of paragraphs; it would run off the page otherwise.
    """
    size, shares = _share_out(sheet.lanes)
    spec = "".join(
        rf"p{{{share:.2f}\linewidth}}" if share else "l" if lane.is_text else "r"
        for lane, share in zip(sheet.lanes, shares, strict=True)
    )
    body = [_latex_row(row, _latex_cell, shares) for row in sheet.rows]
    lines = [
        r"% needs \usepackage{booktabs}",
        r"\begin{table}[htbp]",
        r"  \centering",
        *([f"  {size}"] if size else []),
        rf"  \caption{{{_escape_latex(sheet.title)}}}",
        rf"  \begin{{tabular}}{{{spec or 'l'}}}",
        r"    \toprule",
        _latex_row([lane.label for lane in sheet.lanes], _escape_latex, shares),
        r"    \midrule",
        *body,
        r"    \bottomrule",
        r"  \end{tabular}",
        *(rf"  \par{{\footnotesize {_escape_latex(note)}\par}}" for note in sheet.notes),
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _share_out(lanes: Sequence[Lane]) -> tuple[str, list[float]]:
    """Return the font size at which a table fits a line, estimated from its characters, and the share of the line for
    each column of long text: what the others leave, but at least a few words."""
    longest = [_measure(lane) for lane in lanes]
    most = _NAME if sum(longest) > _SIZES[0][1] else _LONG
    wide = [lane.is_text and length > most for lane, length in zip(lanes, longest, strict=True)]
    taken = sum(length for length, is_wide in zip(longest, wide, strict=True) if not is_wide)
    total = sum(length for length, is_wide in zip(longest, wide, strict=True) if is_wide)
    size, line = next((pair for pair in _SIZES if taken + _NAME * sum(wide) <= pair[1]), _SIZES[-1])
    left = max(0.3, 0.97 - taken / line - 0.02 * sum(wide))
    shares = [
        max(0.1, left * length / total) if is_wide else 0.0 for length, is_wide in zip(longest, wide, strict=True)
    ]
    return size, shares


def _measure(lane: Lane) -> int:
    """Return about how many characters a column needs, including the gap after it."""
    return max((len(cell) for cell in (lane.label, *lane.cells)), default=0) + 3


def _latex_row(cells: Sequence[str], escape: Callable[[str], str], shares: Sequence[float]) -> str:
    """Return one row. Ragged paragraphs redefine `\\\\`, so a row with them ends differently."""
    written = [
        rf"\raggedright {_break_words(escape(cell))}" if share else escape(cell)
        for cell, share in zip(cells, shares, strict=True)
    ]
    end = r"\tabularnewline" if any(shares) else r"\\"
    return f"    {' & '.join(written)} {end}"


def _break_words(source: str) -> str:
    """Return escaped text that may also break inside kernel and module names."""
    return re.sub(r"(\\_|::|[/=]|\.(?=[^\W\d])|(?<=\w),(?=[^\W\d])|(?<=\]),|\$\\cdot\$)", r"\1\\allowbreak{}", source)


def can_stand_in_latex(character: str) -> bool:
    """Return whether pdfLaTeX can set this character, directly or as we write it, without another package or font."""
    return character.isascii() or character in _LATEX or character in _LATIN


def _latex_cell(cell: str) -> str:
    """Return a cell; a negative number gets a minus sign instead of a hyphen."""
    if cell == MISSING:
        return "--"
    return _NEGATIVE.sub("$-$", _escape_latex(cell))


def _escape_latex(text: str) -> str:
    # `--` is an en dash in LaTeX: `{}` between the hyphens keeps `--compile` readable.
    return _LATEX_SPECIAL.sub(lambda match: _LATEX.get(match[0], "{}-"), text)
