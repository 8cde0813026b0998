"""Units of memory and time, and how quantities are written inside a sentence.

Tables keep every digit (`render.numbers`). A sentence has three, in the largest unit that gives at least 1 after
rounding: 999.6 ms becomes 1 s, never 1e+03 ms.
"""

from collections.abc import Iterable

KIB, MIB, GIB = 2**10, 2**20, 2**30
BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
TIME_UNITS = (("s", 1e9), ("ms", 1e6), ("µs", 1e3), ("ns", 1.0))  # with their nanoseconds
LEAST_PERCENT = 0.01  # smaller shares are written as `under 0.01%`
_ROUNDS_UP = 0.9995  # three digits round this fraction of a unit up to 1


def say_digits(value: float) -> str:
    """Return three digits, or the whole number from 1,000 on: never `1e+03`."""
    return f"{value:.3g}" if abs(value) < 1000 * _ROUNDS_UP else f"{value:,.0f}"


def say_time(ns: float) -> str:
    for unit, size in TIME_UNITS[:-1]:
        if abs(ns) >= _ROUNDS_UP * size:
            return f"{say_digits(ns / size)} {unit}"
    return f"{ns:.3g} ns"


def say_size(size: float) -> str:
    """Return a byte count in binary units, with three digits."""
    for power in (3, 2, 1):
        if size >= _ROUNDS_UP * 1024**power:
            return f"{say_digits(size / 1024**power)} {BINARY_UNITS[power]}"
    return f"{size:.0f} bytes"


def say_bytes(size: int) -> str:
    """Return a byte count with four digits, for amounts that a reader adds up."""
    for power in (3, 2, 1):
        if size >= 1024**power:
            value = size / 1024**power
            return f"{value:{',.0f' if value >= 1000 else '.4g'}} {BINARY_UNITS[power]}"
    return f"{size} bytes"


def say_message_bytes(size: int) -> str:
    """Return a byte count in decimal units, as used for messages and bandwidths: 1 MB, 1.5 GB, 400 kB."""
    for unit, unit_size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= unit_size:
            return f"{size / unit_size:g} {unit}"
    return f"{size} B"


def say_flops(flops: float) -> str:
    for limit, unit in ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")):
        if flops >= _ROUNDS_UP * limit:
            return f"{say_digits(flops / limit)} {unit}"
    return f"{flops:,.0f} FLOP"


def say_parameters(count: int) -> str:
    """Return a parameter count the way model names have it: 950K, 129M, 1.24B."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= _ROUNDS_UP * limit:
            return f"{say_digits(count / limit)}{unit}"
    return str(count)


def say_count(count: float) -> str:
    return f"{count:,.0f}" if count == round(count) else f"{count:,.1f}"


def count_noun(count: float, noun: str, plural: str = "") -> str:
    """Return `1 kernel`, `1,265 kernels` or `2.5 kernels`; `plural` is for nouns that do not just take an s."""
    return f"{say_count(count)} {noun if count == 1 else plural or f'{noun}s'}"


def with_article(noun: str) -> str:
    """Return `a list` or `an int`."""
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def say_factor(factor: float) -> str:
    """Return a ratio with three digits: `3.2×`."""
    return f"{say_digits(factor)}×"


def say_share(share: float) -> str:
    """Return a share in percent with one decimal, or three digits below ten: 18.2%, 1.25%."""
    if 0 < 100 * share < LEAST_PERCENT:
        return f"under {LEAST_PERCENT}%"
    return f"{share * 100:.3g}%" if share < 0.0995 else f"{share * 100:.1f}%"


def say_percent(share: float) -> str:
    """Return a share in whole percents, or with two digits below ten: 18%, 1.2%."""
    percent = 100 * share
    if 0 < percent < LEAST_PERCENT:
        return f"under {LEAST_PERCENT}%"
    return f"{percent:.0f}%" if percent >= 9.95 or percent == 0 else f"{percent:.2g}%"


def clip(text: str, most: int) -> str:
    """Return `text`, with `…` in place of its middle if it has more than `most` characters: names of runs and files
    often differ at both ends."""
    if len(text) <= most:
        return text
    head = most // 2
    tail = most - 1 - head
    return f"{text[:head].rstrip()}…{text[len(text) - tail :].lstrip()}"


def say_list(words: Iterable[str]) -> str:
    """Return `a, b and c`."""
    *rest, last = [*words] or [""]
    return f"{', '.join(rest)} and {last}" if rest else last
