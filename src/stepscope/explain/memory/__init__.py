"""Where the memory of a step goes: what is allocated at any moment, what it is for, and when it peaks."""

from stepscope.explain.memory.memory_profile import MemoryProfile, make_memory_profile

__all__ = ["MemoryProfile", "make_memory_profile"]
