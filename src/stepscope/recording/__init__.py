"""Recordings on disk: readable without torch, on a machine without a GPU."""

# The beginning of the names of operators in which autograd evaluates a node, followed by the name of the node. It is
# here because recorders also look for it, in processes that do not load polars.
EVALUATE = "autograd::engine::evaluate_function: "
