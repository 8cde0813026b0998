"""The sections of a report, with their charts and tables."""
