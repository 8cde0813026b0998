"""stepscope inside other tools."""
