"""Where the memory of a step goes: what is there at any moment, whose it is, and when it is most."""

from stepscope.explain.memory.memory_profile import MemoryProfile, make_memory_profile

__all__ = ["MemoryProfile", "make_memory_profile"]
