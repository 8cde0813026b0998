"""How much work a search may do.

Evidence that says little admits hundreds of millions of sizes, and a search has to end. Work is counted and not timed,
so that a file has the same answer on every machine. A search that was cut short says so, and nothing that depends on
what it left out is certain.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class Effort:
    """Units of work that are left. One is about what it takes to hold one candidate against one count of elements,
    0.2 µs on a slow machine."""

    def __init__(self, units: int) -> None:
        self.left = units
        self.is_spent = False  # something was not looked at

    def afford(self, units: int) -> bool:
        """Pay for work if enough is left; otherwise it must not be done."""
        return self.afford_some(1, units) == 1

    def afford_some(self, number: int, units: int) -> int:
        """Pay for as many of a number of equal pieces of work as possible, and say how many."""
        paid = min(number, self.left // units) if units else number
        self.left -= paid * units
        self.is_spent |= paid < number
        return paid

    @contextmanager
    def share(self, parts: int) -> Iterator["Effort"]:
        """One of so many equal parts. What is not used of it comes back."""
        part = Effort(self.left // parts)
        given = part.left
        yield part
        self.left -= given - part.left
        self.is_spent |= part.is_spent
