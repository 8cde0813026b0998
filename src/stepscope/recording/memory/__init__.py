"""Memory snapshots: read them safely, replay the allocator, and convert the result to a recording."""
