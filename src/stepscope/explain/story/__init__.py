"""The story of a run, or of two: what `stepscope report` puts on a page."""

from stepscope.explain.story.comparison import tell_both
from stepscope.explain.story.materials import Materials
from stepscope.explain.story.telling import tell

__all__ = ["Materials", "tell", "tell_both"]
