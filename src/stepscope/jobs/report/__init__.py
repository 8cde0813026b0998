"""`stepscope report`: the stages, the folder they leave, and the page."""
