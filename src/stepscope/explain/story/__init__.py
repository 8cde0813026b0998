"""The story of a run, of two, or of many: what `stepscope report` puts on a page."""

from stepscope.explain.story.comparison.report import tell_both
from stepscope.explain.story.comparison.run_series import RunSeries
from stepscope.explain.story.comparison.trend_report import tell_many
from stepscope.explain.story.run import tell
from stepscope.explain.story.sources import Materials

__all__ = ["Materials", "RunSeries", "tell", "tell_both", "tell_many"]
