"""What a recording means: from raw samples and events to tables and figures. No torch."""
