"""Kernel traces: what each kernel belongs to, and time that adds up."""
