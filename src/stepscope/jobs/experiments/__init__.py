"""Resumable sweeps over cases."""
