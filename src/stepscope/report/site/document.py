"""A report as one HTML page: words and tables as HTML, data as JSON, one style sheet and one script, and nothing from
elsewhere.

What can be read without a script is there without one: the sentence, the figures, the advice, every table. The script
sorts and searches, and draws what is data. Libraries were not taken: the common ones for charts need `eval`, which the
page's policy does not allow, and are larger than the whole page.

What comes from a recording is text and stays text: it is escaped where it is HTML, embedded as JSON that no tag can end
where it is data, and the policy lets nothing run but the script whose hash it names, nor anything be fetched.
"""

from stepscope.findings import Report
from stepscope.report.site.colours import assign_colours
from stepscope.report.site.inlining import embed, join_scripts, join_styles, write_policy
from stepscope.report.site.opening import write_opening
from stepscope.report.site.packing import pack_exhibits
from stepscope.report.site.sections import write_footer, write_navigation, write_sections
from stepscope.report.site.text import clean, markup

STYLES = ("page.css", "opening.css", "exhibits.css", "charts.css", "print.css")
# In this order in one function: the core first, then what registers with it, and at last what starts it all.
SCRIPTS = (
    "core.js",
    "tables.js",
    "bars.js",
    "breakdown.js",
    "kernels.js",
    "plotting.js",
    "axes.js",
    "lanes_model.js",
    "lanes_painter.js",
    "lanes.js",
    "roofline.js",
    "figure.js",
    "timeline_model.js",
    "timeline_painter.js",
    "timeline.js",
    "start.js",
)

_PAGE = """<!DOCTYPE html>
<html lang="en" dir="ltr" data-theme="auto">
<head>
<meta charset="utf-8">
<meta name="generator" content="stepscope {version}">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the report</a>
{navigation}
<main id="main">
{opening}
<noscript><p class="strip">Charts, search and sorting need JavaScript. Nothing leaves this page.</p></noscript>
{sections}
{footer}
</main>
<div id="tip" hidden></div>
<div id="said" class="unseen" role="status"></div>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def write_site(report: Report) -> str:
    """The page of a report, whole."""
    style, script = join_styles(STYLES), join_scripts(SCRIPTS)
    return _PAGE.format(
        version=markup(report.version, 60),
        policy=write_policy(script, style),
        title=markup(report.title or "Training step"),
        style=style,
        navigation=write_navigation(report),
        opening=write_opening(report),
        sections=write_sections(report),
        footer=write_footer(report),
        data=embed(_pack(report)),
        script=script,
    )


def _pack(report: Report) -> dict[str, object]:
    colours = {clean(group): pair for group, pair in assign_colours(report).items()}
    return {"colours": colours, "exhibits": pack_exhibits(report)}
