"""Collectives, and the ranks of one run compared by them."""
