"""Units of memory and time, and how a quantity is worded inside a sentence.

Tables keep every digit (`render.numbers`); a sentence has three, in the largest unit of which there is at least one
once rounded: 999.6 ms is worded as 1 s, and never as 1e+03 ms.
"""

KIB, MIB, GIB = 2**10, 2**20, 2**30
BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
TIME_UNITS = (("s", 1e9), ("ms", 1e6), ("µs", 1e3), ("ns", 1.0))  # with their nanoseconds
LEAST_PERCENT = 0.01  # a smaller share is said to be under it
_ROUNDS_UP = 0.9995  # of a unit: three digits make one of it


def say_digits(value: float) -> str:
    """Three digits, and from a thousand on all of them: never `1e+03`."""
    return f"{value:.3g}" if abs(value) < 1000 * _ROUNDS_UP else f"{value:,.0f}"


def say_time(ns: float) -> str:
    for unit, size in TIME_UNITS[:-1]:
        if abs(ns) >= _ROUNDS_UP * size:
            return f"{say_digits(ns / size)} {unit}"
    return f"{ns:.3g} ns"


def say_size(size: float) -> str:
    """A byte count in binary units, with three digits."""
    for power in (3, 2, 1):
        if size >= _ROUNDS_UP * 1024**power:
            return f"{say_digits(size / 1024**power)} {BINARY_UNITS[power]}"
    return f"{size:.0f} bytes"


def say_bytes(size: int) -> str:
    """A byte count with four digits, for amounts that a reader adds up."""
    for power in (3, 2, 1):
        if size >= 1024**power:
            return f"{size / 1024**power:,.4g} {BINARY_UNITS[power]}"
    return f"{size} bytes"


def say_message_bytes(size: int) -> str:
    """A byte count in decimal units, as messages and bandwidths are counted: 1 MB, 1.5 GB, 400 kB."""
    for unit, unit_size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= unit_size:
            return f"{size / unit_size:g} {unit}"
    return f"{size} B"


def say_flops(flops: float) -> str:
    for limit, unit in ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")):
        if flops >= _ROUNDS_UP * limit:
            return f"{say_digits(flops / limit)} {unit}"
    return f"{flops:,.0f} FLOP"


def say_count(count: float) -> str:
    return f"{count:,.0f}" if count == round(count) else f"{count:,.1f}"


def say_share(share: float) -> str:
    """A share in per cent: one decimal, and three digits below ten."""
    if 0 < 100 * share < LEAST_PERCENT:
        return f"under {LEAST_PERCENT} %"
    return f"{share * 100:.3g} %" if share < 0.0995 else f"{share * 100:.1f} %"


def say_percent(share: float) -> str:
    """A share in whole per cents, and two digits below ten: 1.2 %."""
    percent = 100 * share
    if 0 < percent < LEAST_PERCENT:
        return f"under {LEAST_PERCENT} %"
    return f"{percent:.0f} %" if percent >= 9.95 or percent == 0 else f"{percent:.2g} %"
