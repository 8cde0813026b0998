"""All integers that fit what was seen, ranked, and said with what is certain: `stepscope recover`."""
