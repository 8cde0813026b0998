"""Signed reports: their contents and hashes, the keys, and the signatures."""
