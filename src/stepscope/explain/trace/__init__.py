"""Kernel traces: what each kernel belongs to, and where the time goes."""
