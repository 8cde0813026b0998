"""`stepscope report`: its stages, the directory that keeps their results, and the page."""
