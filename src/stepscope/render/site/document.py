"""A report as one self-contained HTML page: text and tables as HTML, data as JSON, one style sheet and one script.

Text, numbers, findings and tables need no script. The script sorts, searches and draws the large charts. It uses
no chart library: the common ones need `eval`, which the page's policy forbids, and are larger than the whole page.

Text from a recording stays text: it is escaped in HTML and embedded as JSON that cannot close its tag. The policy
allows only the script whose hash it names, and no requests.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from html import escape
from importlib import resources

import msgspec

from stepscope.files import GENERATOR
from stepscope.findings import CHANGES, Figure, Report, Timeline
from stepscope.render.drawing.colours import Pair, Palette, assign_colours, write_colours
from stepscope.render.drawing.timeline_layout import find_peak, format_height, format_moment
from stepscope.render.formats import clean
from stepscope.render.site.charts import pack_drawing, tabulate_pieces
from stepscope.render.site.hints import write_hint
from stepscope.render.site.html import markup, prose, write_table
from stepscope.render.site.opening import write_advice, write_opening
from stepscope.render.site.packing import pack_exhibits, pack_timeline
from stepscope.render.site.sections import write_chart, write_footer, write_navigation, write_picture, write_sections

_STYLES = ("page.css", "opening.css", "exhibits.css", "charts.css")
# Joined in this order in one function: the core, the charts that register with it, and the code that starts the page.
_SCRIPTS = (
    "core.js",
    "tables.js",
    "drawings.js",
    "modules.js",
    "breakdown.js",
    "kernels.js",
    "tree.js",
    "plotting.js",
    "flame_boxes.js",
    "flame_painter.js",
    "flame.js",
    "lanes_painter.js",
    "lanes.js",
    "timeline_painter.js",
    "timeline.js",
    "start.js",
)
# For a page with a single chart.
_STYLES_ALONE = ("page.css", "exhibits.css", "charts.css")
_SCRIPTS_ALONE = (
    "core.js",
    "tables.js",
    "drawings.js",
    "plotting.js",
    "timeline_painter.js",
    "timeline.js",
    "start.js",
)
_MOST_PARTS = 12

_PAGE = """<!DOCTYPE html>
<html lang="en" dir="ltr" data-theme="auto">
<head>
<meta charset="utf-8">
<meta name="generator" content="{generator}">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body{kind}>
{content}
<div id="tip" hidden></div>
<div id="said" class="unseen" role="status"></div>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""

_REPORT = """<a class="skip" href="#main">Skip to the report</a>
{navigation}
<main id="main">
{opening}
{changes}
{advice}
<noscript><p class="strip">Charts, search and sorting need JavaScript. No data leaves this page.</p></noscript>
{sections}
{footer}
</main>"""
_ALONE = """<main id="main">
<button type="button" id="theme" class="quiet" hidden>Theme: auto</button>
<div class="titled"><h1>{title}</h1>{hint}</div>
<p class="subtitle">{subtitle}</p>
{above}
<noscript><p>Tooltips and zoom need JavaScript. No data leaves this page.</p></noscript>
{chart}
{below}
</main>"""


def write_site(report: Report) -> str:
    """Return the page of a report."""
    parts = [exhibit.part for section in report.sections for exhibit in section.exhibits]
    colours = assign_colours([report.picture, *parts])
    palette = Palette(colours, on_page=True)
    # A comparison starts with what changed.
    changes = [section for section in report.sections if section.key == CHANGES]
    others = [section for section in report.sections if section.key != CHANGES]
    content = _REPORT.format(
        navigation=write_navigation(report),
        opening=write_opening(report, write_picture(report, palette)),
        changes=write_sections(changes, palette),
        advice=write_advice(report),
        sections=write_sections(others, palette),
        footer=write_footer(report),
    )
    return _write_page(
        title=report.title or "Training step",
        generator=f"stepscope {clean(report.version, 60)}",
        content=content,
        colours=colours,
        exhibits=pack_exhibits(report),
        styles=_STYLES,
        scripts=_SCRIPTS,
    )


def write_chart_page(part: Figure | Timeline, detail: float) -> str:
    """Return a page with one chart. `detail` is the share of a timeline's pieces that are drawn one by one at first; a
    slider changes it."""
    colours = assign_colours([part])
    # Nothing else on this page uses the wheel, and there is room for a table of the pieces.
    packed = pack_timeline(part, detail) | {"isAlone": True} if isinstance(part, Timeline) else pack_drawing(part, "")
    untitled = msgspec.structs.replace(part, title="", subtitle="")
    content = _ALONE.format(
        title=markup(part.title),
        hint=write_hint(part),
        subtitle=prose(part.subtitle),
        above=_describe_peak(part) if isinstance(part, Timeline) else "",
        chart=write_chart(untitled, "chart", "", Palette(colours, on_page=True)),
        below=write_table(tabulate_pieces(part), "pieces") if isinstance(part, Timeline) and part.pieces else "",
    )
    return _write_page(
        title=part.title,
        generator=GENERATOR,
        content=content,
        colours=colours,
        exhibits={"chart": packed},
        styles=_STYLES_ALONE,
        scripts=_SCRIPTS_ALONE,
        kind=' class="alone"',
    )


def _write_page(
    *,
    title: str,
    generator: str,
    content: str,
    colours: Mapping[str, Pair],
    exhibits: Mapping[str, object],
    styles: Iterable[str],
    scripts: Iterable[str],
    kind: str = "",
) -> str:
    style, script = _join_styles(styles) + write_colours(colours.values()), _join_scripts(scripts)
    named = {clean(group): pair for group, pair in colours.items()}
    return _PAGE.format(
        generator=escape(generator),
        policy=_write_policy(script, style),
        title=markup(title),
        style=style,
        kind=kind,
        content=content,
        data=_embed({"colours": named, "exhibits": exhibits}),
        script=script,
    )


def _describe_peak(timeline: Timeline) -> str:
    """Return the peak and its parts, largest first, as a sentence."""
    peak = find_peak(timeline)
    if peak is None or not peak.value:
        return '<p class="peak" id="peak">Nothing to draw.</p>'
    heights = sorted(((area.values[peak.slice], area.name) for area in timeline.areas), reverse=True)
    parts = [f"{clean(name, 60)} {format_height(timeline.y, height)}" for height, name in heights if height]
    text = f"Peak {format_height(timeline.y, peak.value)} at {format_moment(timeline.x, peak.time)}:"
    said = f"{', '.join(parts[:_MOST_PARTS])}{' and more' if len(parts) > _MOST_PARTS else ''}."
    return f'<p class="peak" id="peak"><strong>{escape(text)}</strong> {escape(said)}</p>'


# --- what is embedded in the page ----------------------------------------------------------------


def _join_styles(names: Iterable[str]) -> str:
    return "".join(map(_read, names))


def _join_scripts(names: Iterable[str]) -> str:
    """Return the scripts as one function: they share names with each other and with nothing else."""
    return "".join(('(() => {\n"use strict";\n', *map(_read, names), "})();\n"))


def _write_policy(script: str, style: str) -> str:
    """Return a policy, escaped for an attribute, that allows only this script and this style."""
    allowed = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'"
    return escape(f"{allowed}; base-uri 'none'; form-action 'none'")


def _embed(data: Mapping[str, object]) -> str:
    """Return JSON for a script element. Only `<` can close one or open a comment, and JSON can escape it."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def _read(name: str) -> str:
    return resources.files("stepscope.render.site").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
