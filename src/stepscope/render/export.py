"""A report as files for a paper: figures as PNG, SVG and PDF, tables as Markdown, LaTeX and CSV.

The directory is built next to its target and moved there once it is complete. It replaces only an earlier export
without other files: an export keeps a list of its files, and anything else is somebody's work.
"""

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec

from stepscope.errors import StepscopeError
from stepscope.files import find_foreign, read_plain, replacing, require_parent, restore, writing
from stepscope.findings import Report, Table
from stepscope.render.figures import convert_for_print
from stepscope.render.formats import NAME, PROSE, Format, clean, cut
from stepscope.render.markup import can_stand_in_latex, escape_markdown
from stepscope.render.paper import Drawing, Listing, collect, tidy
from stepscope.render.tables import render

_LIST = ".stepscope-export"
_FIGURES, _TABLES, _README = "figures", "tables", "README.md"
# LaTeX silently cuts off a float longer than a page, and nobody reads more rows than this in Markdown.
_MOST_ROWS = {Format.LATEX: 40, Format.MD: 200}
# LaTeX breaks cells of this length into several lines, so fewer rows fill the page.
_LONG_CELL, _MOST_LONG_ROWS = 45, 16
_SUFFIXES = {Format.MD: ".md", Format.LATEX: ".tex", Format.CSV: ".csv"}


def check_folder(folder: Path) -> None:
    """Raise now for an export that could not be written after minutes of measuring. Only an earlier export is
    replaced."""
    folder = folder.resolve()
    restore(folder)
    if find_spec("vl_convert") is None:
        raise StepscopeError(
            "drawing figures requires vl-convert, which is not installed", hint="pip install vl-convert-python"
        )
    require_parent(folder)
    if not folder.exists():
        return
    if not folder.is_dir():
        raise StepscopeError(f"not a directory: `{folder}`", hint="--export OTHER_DIRECTORY")
    foreign = find_foreign(folder, _names_of(folder).__contains__)
    if foreign is not None:
        raise StepscopeError(
            f"`{folder}` contains a file that is not part of an export: `{foreign}`",
            detail="an export only replaces a directory that contains nothing but an earlier export",
            hint="--export OTHER_DIRECTORY",
        )


def _names_of(folder: Path) -> frozenset[str]:
    """Return the files that an earlier export lists in a directory; none if there was no export."""
    try:
        own = read_plain(folder / _LIST).decode().splitlines()
    except (OSError, UnicodeDecodeError):
        return frozenset()
    return frozenset((*own, _LIST, f"{_FIGURES}/", f"{_TABLES}/"))


def export(report: Report, folder: Path) -> tuple[Path, ...]:
    """Write the complete export or nothing, and return its files."""
    check_folder(folder)
    clear: Report = tidy(report)
    drawings, listings = collect(clear)
    with (
        writing(folder, if_full="nothing was written", hint="--export DIRECTORY_ON_ANOTHER_DISK"),
        replacing(folder) as building,
    ):
        building.mkdir()
        names = [*_write_figures(drawings, building), *_write_tables(listings, building), _README]
        (building / _README).write_text(_describe(clear, drawings, listings), encoding="utf-8")
        (building / _LIST).write_text("\n".join(names) + "\n", encoding="utf-8")
    return tuple(folder / name for name in names)


def _write_figures(drawings: Iterable[Drawing], building: Path) -> Iterable[str]:
    shelf = building / _FIGURES
    shelf.mkdir()
    for drawing in drawings:
        for suffix, content in convert_for_print(drawing.draw()).items():
            (shelf / f"{drawing.key}{suffix}").write_bytes(content)
            yield f"{_FIGURES}/{drawing.key}{suffix}"


def _write_tables(listings: Iterable[Listing], building: Path) -> Iterable[str]:
    shelf = building / _TABLES
    shelf.mkdir()
    for listing in listings:
        for form, suffix in _SUFFIXES.items():
            (shelf / f"{listing.key}{suffix}").write_text(_render(listing, form), encoding="utf-8", newline="")
            yield f"{_TABLES}/{listing.key}{suffix}"


def _render(listing: Listing, form: Format) -> str:
    if form is Format.CSV:
        return render(listing.table, form)
    most_rows = _MOST_ROWS[form]
    if form is Format.LATEX and _has_long_cells(listing.table):
        most_rows = _MOST_LONG_ROWS
    table = _shorten(listing.table, most_rows, in_latex=form is Format.LATEX)
    content = render(table, form)
    if form is Format.LATEX:
        end = "\\end{table}\n"
        content = f"{content.removesuffix(end)}  \\label{{tab:{listing.key}}}\n{end}"
    return content


def _has_long_cells(table: Table) -> bool:
    shown = [at for at, column in enumerate(table.columns) if column.kind == "text" and not column.detail]
    return any(len(str(row[at])) > _LONG_CELL for row in table.rows[: _MOST_ROWS[Format.LATEX]] for at in shown)


def _shorten(table: Table, most_rows: int, *, in_latex: bool) -> Table:
    """Return the table for readers: its first rows, with long text shortened."""

    def shorten(text: str, most: int = NAME) -> str:
        return cut(_spell_for_latex(text) if in_latex else text, most)

    hidden = len(table.rows) - most_rows
    notes = [f"First {most_rows:,} of {len(table.rows):,} rows; the CSV has all."] if hidden > 0 else []
    return msgspec.structs.replace(
        table,
        title=shorten(table.title),
        columns=tuple(msgspec.structs.replace(column, label=shorten(column.label)) for column in table.columns),
        rows=tuple(
            tuple(shorten(cell) if isinstance(cell, str) else cell for cell in row) for row in table.rows[:most_rows]
        ),
        notes=tuple(shorten(note, PROSE) for note in (*notes, *table.notes)),
    )


def _spell_for_latex(text: str) -> str:
    """Spell out characters that the default fonts of pdfLaTeX lack, because they would stop it."""
    return "".join(
        character if character in "\n\t" or can_stand_in_latex(character) else f"U+{ord(character):04X}"
        for character in text[: 2 * PROSE]
    )


def _describe(report: Report, drawings: Sequence[Drawing], listings: Sequence[Listing]) -> str:
    """Return the README of the directory: what each file shows, how they were made, and how to use them in a
    document."""
    parts = [
        f"# {_say(report.title) or 'stepscope report'}",
        _say(report.sentence),
        _say(report.subtitle),
        _say(report.soundness.sentence),
        "This report is incomplete: it was exported before all stages had finished." if report.is_partial else "",
        *_tell_commands(report),
        "## Files",
        "Figures are in `figures/` as PNG, SVG and PDF, tables in `tables/` as Markdown, LaTeX and CSV. CSV files "
        "have all rows and columns in full precision. Markdown and LaTeX are rounded; a note says if rows are missing.",
        _list_files(None, drawings, listings),
        *(
            part
            for place in range(len(report.sections))
            for part in _describe_section(report, place, drawings, listings)
        ),
        "## In LaTeX",
        *_show_latex(drawings[0].key if drawings else "", listings[0].key),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _describe_section(
    report: Report, place: int, drawings: Sequence[Drawing], listings: Sequence[Listing]
) -> Iterable[str]:
    section, files = report.sections[place], _list_files(place, drawings, listings)
    if files or section.missing:
        yield f"### {_say(section.title)}"
        yield _say(section.lead)
        yield files
        yield "\n".join(f"- Missing: {_say(one.what)}: {_say(one.why)}" for one in section.missing)


def _show_latex(figure: str, table: str) -> Iterable[str]:
    yield "Everything works with pdfLaTeX. Tables have a caption and a label."
    yield "    \\usepackage{graphicx}\n    \\usepackage{booktabs}"
    if figure:
        yield "\n".join(
            (
                "    \\begin{figure}",
                "      \\centering",
                f"      \\includegraphics[width=\\linewidth]{{figures/{figure}.pdf}}",
                "      \\caption{...}",
                f"      \\label{{fig:{figure}}}",
                "    \\end{figure}",
            )
        )
    yield f"    Table~\\ref{{tab:{table}}} ...\n    \\input{{tables/{table}.tex}}"


def _tell_commands(report: Report) -> Iterable[str]:
    yield f"Made with stepscope {_say(report.version)}".rstrip() + (", by:" if report.commands else ".")
    for command in report.commands:
        lines = clean(command.text, PROSE, lines=True).splitlines()
        yield "\n".join([f"- {_say(command.label)}", "", *(f"      {line}" for line in lines)])


def _list_files(place: int | None, drawings: Sequence[Drawing], listings: Sequence[Listing]) -> str:
    """Return the list of the files of one section, or of the summary."""
    rows = [
        f"| `{shelf}/{piece.key}` | {_say(piece.title)} |"
        for shelf, pieces in ((_FIGURES, drawings), (_TABLES, listings))
        for piece in pieces
        if piece.section == place
    ]
    return "\n".join(["| file | content |", "| --- | --- |", *rows]) if rows else ""


def _say(text: str) -> str:
    """Return text as one line of Markdown without formatting."""
    return escape_markdown(" ".join(clean(text, PROSE).split()))
