"""A picture as a file: PNG, SVG, PDF or, of a `Figure` or a `Timeline`, one self-contained HTML page.

Everything is drawn on this machine: vl-convert carries Vega and its fonts, and the HTML page holds its
scripts inline, so a figure can be made on a cluster node and opened on a train. How it looks is decided in
`chart` and the other charts, once for all formats; only the page of a timeline is drawn by a script of its own
(`timeline_page`), as Vega cannot move a million events.
"""

import json
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.errors import StepscopeError
from stepscope.files import GENERATOR, check_target, stamp, write_atomically, writing
from stepscope.findings import Figure, Timeline
from stepscope.report.chart import define
from stepscope.report.timeline_chart import define_timeline
from stepscope.report.timeline_layout import DEFAULT_DETAIL, check_detail
from stepscope.report.timeline_page import write_page

if TYPE_CHECKING:
    import altair as alt

SUFFIXES = (".png", ".svg", ".pdf", ".html")

_PNG_SCALE = 2
# About 300 dots an inch where a picture is as wide as a page.
_PRINT_SCALE = 3.0
# What the bundled scripts leave behind for the page: the one function it calls.
_EXPORT = "window.vegaEmbed = vegaEmbed;"

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="{generator}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<script>{bundle}</script>
</head>
<body>
<div id="figure"></div>
<script>vegaEmbed("#figure", {spec}, {{actions: false, renderer: "svg"}});</script>
</body>
</html>
"""


def save(figure: Figure | Timeline, path: Path, *, detail: float = DEFAULT_DETAIL) -> None:
    """Draw the figure into `path`; the suffix says how. The file is there whole or not at all. `detail` is the share of
    a timeline's pieces that are drawn one by one, the largest first."""
    check_figure(path, force=True)
    content = draw(figure, path.suffix.lower(), detail=detail)
    with writing(path, if_full="the figure is as it was before", hint=f"ls -ld {path.parent} {path}"):
        write_atomically(path, content)


def check_figure(path: Path, *, force: bool) -> None:
    """Refuse what could not be written after hours of measuring. Without `force` only a figure of ours is replaced."""
    if path.suffix.lower() not in SUFFIXES:
        raise StepscopeError(
            f"a figure cannot be written as `{path.suffix or path.name}`: `{path}`",
            detail=f"expected one of {', '.join(SUFFIXES)}",
            hint=f"--plot {path.stem or 'figure'}.png",
        )
    check_target(path, force=force, flag="--plot")


def draw_for_print(chart: "alt.FacetChart | alt.LayerChart") -> dict[str, bytes]:
    """The chart in every format of a paper, by suffix. All are made from one SVG: Vega, which takes most of
    the time, runs once instead of three times."""
    import altair
    import vl_convert

    version = ".".join(altair.SCHEMA_VERSION.split(".")[:2])
    svg = str(vl_convert.vegalite_to_svg(chart.to_dict(), vl_version=version))
    png: bytes = vl_convert.svg_to_png(svg, scale=_PRINT_SCALE)
    pdf: bytes = vl_convert.svg_to_pdf(svg)
    contents = {".png": png, ".svg": svg.encode(), ".pdf": pdf}
    return {suffix: stamp(content, suffix) for suffix, content in contents.items()}


def draw(figure: Figure | Timeline, suffix: str, *, detail: float = DEFAULT_DETAIL) -> bytes:
    """The figure as the content of a file with this suffix, one of `SUFFIXES`."""
    check_detail(detail)
    if isinstance(figure, Timeline) and suffix == ".html":
        return write_page(figure, detail).encode()
    import altair  # most of a second: not at the top, where `--help` would pay for it
    import vl_convert

    chart = define_timeline(figure, detail) if isinstance(figure, Timeline) else define(figure)
    spec = chart.to_dict()
    version = ".".join(altair.SCHEMA_VERSION.split(".")[:2])
    match suffix:
        case ".png":
            png: bytes = vl_convert.vegalite_to_png(spec, vl_version=version, scale=_PNG_SCALE)
            return stamp(png, suffix)
        case ".svg":
            return stamp(str(vl_convert.vegalite_to_svg(spec, vl_version=version)).encode(), suffix)
        case ".pdf":
            pdf: bytes = vl_convert.vegalite_to_pdf(spec, vl_version=version)
            return stamp(pdf, suffix)
        case ".html":
            return _page(figure.title, spec, vl_convert.javascript_bundle(_EXPORT, version)).encode()
        case _:
            raise ValueError(f"no figure has the suffix {suffix!r}; expected one of {', '.join(SUFFIXES)}")


def _page(title: str, spec: dict[str, Any], bundle: str) -> str:
    # A series named `</script>` must not end the script it stands in.
    inline = json.dumps(spec).replace("<", "\\u003c")
    return _PAGE.format(generator=GENERATOR, title=escape(title), bundle=bundle, spec=inline)
