"""Signed reports: contents, hashes, keys and signatures."""
