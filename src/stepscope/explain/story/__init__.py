"""The story of a run, or of two: what `stepscope report` puts on a page."""
