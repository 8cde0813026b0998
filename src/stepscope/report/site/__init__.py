"""A report as one HTML page that needs nothing beside itself."""

from stepscope.report.site.document import write_site

__all__ = ["write_site"]
