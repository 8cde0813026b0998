"""A report as one HTML page that needs nothing beside itself."""

from stepscope.report.site.document import is_site, write_site

__all__ = ["is_site", "write_site"]
