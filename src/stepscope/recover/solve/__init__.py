"""Find all sizes that fit the evidence, rank them, and decide which are certain: `stepscope recover`."""
