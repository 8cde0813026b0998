"""A chart as a file: PNG, SVG, PDF, or one self-contained HTML page for a `Figure` or a `Timeline`.

Nothing is fetched, so a figure can be made on a cluster node and opened offline: `drawing` lays the chart out as SVG,
and vl-convert, which has its own fonts, converts it to the other formats. A page has the drawing and the scripts of the
report's page inline.
"""

from pathlib import Path

from stepscope.errors import StepscopeError
from stepscope.files import check_target, stamp, write_atomically, writing
from stepscope.findings import Figure, Timeline
from stepscope.render.drawing import draw_part
from stepscope.render.drawing.timeline_layout import DEFAULT_DETAIL, check_detail
from stepscope.render.site import write_chart_page

SUFFIXES = (".png", ".svg", ".pdf", ".html")

_PNG_SCALE = 2.0
# About 300 dpi for a chart as wide as a page.
_PRINT_SCALE = 3.0


def save(figure: Figure | Timeline, path: Path, *, detail: float = DEFAULT_DETAIL) -> None:
    """Write the figure to `path`, in the format of its suffix; a failed write leaves no partial file. `detail` is the
    share of a timeline's pieces that are drawn one by one, the largest first."""
    check_figure(path, force=True)
    content = draw(figure, path.suffix.lower(), detail=detail)
    with writing(path, if_full="nothing was written; free some space", hint="--plot FILE"):
        write_atomically(path, content)


def check_figure(path: Path, *, force: bool) -> None:
    """Raise now for a figure that could not be written after hours of measuring. Without `force`, only a figure made by
    stepscope is replaced."""
    if path.suffix.lower() not in SUFFIXES:
        raise StepscopeError(
            f"unsupported figure format `{path.suffix or path.name}`: `{path}`",
            detail=f"expected one of {', '.join(SUFFIXES)}",
            hint=f"--plot {path.stem or 'figure'}.png",
        )
    check_target(path, force=force, flag="--plot")


def convert_for_print(svg: str) -> dict[str, bytes]:
    """Return the chart in every format for a paper, by suffix."""
    return {suffix: _convert(svg, suffix, _PRINT_SCALE) for suffix in (".png", ".svg", ".pdf")}


def _convert(svg: str, suffix: str, scale: float) -> bytes:
    import vl_convert  # takes a sixth of a second: at the top, `--help` would pay for it

    match suffix:
        case ".png":
            return stamp(vl_convert.svg_to_png(svg, scale=scale), suffix)
        case ".svg":
            return stamp(svg.encode(), suffix)
        case ".pdf":
            return stamp(vl_convert.svg_to_pdf(svg), suffix)
        case _:
            raise ValueError(f"unsupported figure format {suffix!r}; expected one of {', '.join(SUFFIXES)}")


def draw(figure: Figure | Timeline, suffix: str, *, detail: float = DEFAULT_DETAIL) -> bytes:
    """Return the content of a file with this suffix, one of `SUFFIXES`."""
    check_detail(detail)
    if suffix == ".html":
        return write_chart_page(figure, detail).encode()
    return _convert(draw_part(figure, detail), suffix, _PNG_SCALE)
