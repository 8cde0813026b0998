"""Tables and figures of what `bench`, `attention`, `comm` and `train` measured."""
