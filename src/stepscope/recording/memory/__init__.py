"""Memory snapshots: reading them safely, replaying the allocator, and making a recording of the result."""
