"""The story of a run, or of two: what `stepscope report` puts on a page."""

from stepscope.explain.story.comparison.report import tell_both
from stepscope.explain.story.run import tell
from stepscope.explain.story.sources import Materials

__all__ = ["Materials", "tell", "tell_both"]
