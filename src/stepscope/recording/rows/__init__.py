"""What the measuring verbs keep of a case, and the results files that hold it."""
