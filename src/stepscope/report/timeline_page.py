"""A timeline as one HTML page that moves: the data, a style sheet and a script by hand, in one file, without a network.

Vega draws a hundred thousand events in seconds and moves none of them, so the page has a script of its own that writes
pixels. What comes from a recording is data and stays data: it is embedded as JSON
that no tag can end, the script puts it in as text, and the page's policy lets nothing run but the script whose hash it
names, nor anything be fetched.

Numbers are arrays, heights are differences in steps of what divides all of them (allocators round to 512 bytes), and a
text that occurs often, such as a stack frame, is there once.
"""

from html import escape
from typing import Any

from stepscope.files import GENERATOR
from stepscope.findings import Timeline
from stepscope.report.site.chart_packing import pack_timeline
from stepscope.report.site.inlining import embed, join_scripts, join_styles, write_policy
from stepscope.report.site.text import PROSE, clean, markup
from stepscope.report.timeline_layout import colour_of, find_peak, format_height, format_time

_STYLES = ("timeline_page.css", "charts.css")
# In this order in one function: the core that the report's page has too, the chart, and what is of this page.
_SCRIPTS = ("core.js", "plotting.js", "timeline_model.js", "timeline_painter.js", "timeline.js", "timeline_page.js")
_MOST_PARTS = 12

_PAGE = """<!DOCTYPE html>
<html lang="en" dir="ltr" data-theme="auto">
<head>
<meta charset="utf-8">
<meta name="generator" content="{generator}">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
<p class="subtitle">{subtitle}</p>
<p class="peak" id="peak"><strong>{peak}</strong> {parts}</p>
<noscript><p>The picture needs JavaScript; nothing leaves this page.</p></noscript>
<figure class="chart timeline"><div class="body"></div></figure>
<h2>Largest pieces</h2>
<div class="scroll"><table role="grid">
<thead><tr><th class="number">size</th><th>what</th><th>area</th><th class="number when">from</th>
<th class="number when">to</th></tr></thead>
<tbody id="pieces"></tbody>
</table></div>
<p class="of" id="rest"></p>
<ul class="notes">{notes}</ul>
<div id="tip" hidden></div>
<div id="said" class="unseen" role="status"></div>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def write_page(timeline: Timeline, detail: float) -> str:
    """The page of a timeline, with this share of its pieces told apart until the reader moves the slider."""
    style, script = join_styles(_STYLES), join_scripts(_SCRIPTS)
    peak, parts = _describe_peak(timeline)
    return _PAGE.format(
        generator=GENERATOR,
        policy=write_policy(script, style),
        title=markup(timeline.title),
        subtitle=markup(timeline.subtitle, PROSE),
        peak=escape(peak),
        parts=escape(parts),
        notes="".join(f"<li>{markup(note, PROSE)}</li>" for note in timeline.notes),
        data=embed(_pack(timeline, detail)),
        script=script,
        style=style,
    )


def _pack(timeline: Timeline, detail: float) -> dict[str, Any]:
    """The chart's data with the colours of its areas, which here go by their place: the same in light and dark."""
    colours = {clean(area.name): [colour_of(place)] * 2 for place, area in enumerate(timeline.areas)}
    return pack_timeline(timeline, detail) | {"colours": colours}


def _describe_peak(timeline: Timeline) -> tuple[str, str]:
    """The peak in words, and what it is made of, the largest first."""
    peak = find_peak(timeline)
    if peak is None or not peak.value:
        return "Nothing to draw.", ""
    heights = sorted(((area.values[peak.slice], area.name) for area in timeline.areas), reverse=True)
    parts = [f"{clean(name, 60)} {format_height(timeline.y, height)}" for height, name in heights if height]
    text = f"Peak {format_height(timeline.y, peak.value)} at {format_time(timeline.x, peak.time)}:"
    return text, f"{', '.join(parts[:_MOST_PARTS])}{' and more' if len(parts) > _MOST_PARTS else ''}."
