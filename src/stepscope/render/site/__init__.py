"""A report, or one chart of it, as one HTML page that needs no other file."""

from stepscope.render.site.document import write_chart_page, write_site

__all__ = ["write_chart_page", "write_site"]
