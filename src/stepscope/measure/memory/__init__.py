"""Memory limits and peaks of a process, and the recorded memory history of a step."""
