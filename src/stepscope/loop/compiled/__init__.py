"""Modules of code that the script compiles, noted from its first import of the compiler on."""
