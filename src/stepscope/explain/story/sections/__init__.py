"""The sections of a report, and the pictures and tables that stand in them."""
