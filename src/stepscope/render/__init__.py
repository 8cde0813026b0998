"""Rendering: tables as text, Markdown, LaTeX, CSV and JSON; figures as PNG, SVG, PDF and HTML.

Everything here takes a finished `Table` or `Figure` and draws it. Nothing here computes a result, and nothing imports
torch.
"""
