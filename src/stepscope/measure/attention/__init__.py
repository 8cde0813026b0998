"""Attention alone, by each of its implementations: is it right, what memory does it take, how long does it run?"""
