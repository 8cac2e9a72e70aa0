"""Parsing, formatting and rounding of sizes and durations, as people and Kubernetes write them. Pure."""

from __future__ import annotations

import re
from decimal import Decimal

SIZE_PATTERN = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$"
"""Pattern of a size in every place where users write one: a custom resource, a file, a flag."""

_SUFFIXES = {"n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "": Decimal(1)}
_SUFFIXES |= {suffix: Decimal(1000) ** power for power, suffix in enumerate("kMGTPE", 1)}
_SUFFIXES |= {f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", 1)}
_QUANTITY = re.compile(
    r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:[eE]([+-]?[0-9]{1,2}))?([numkMGTPE]|[KMGTPE]i)?"
)

_SECONDS = {"ms": 1e-3, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION_PART = r"([0-9]{1,9})([smhdw])"


def parse_quantity(value: object) -> Decimal:
    """Return the value of a Kubernetes quantity such as ``64Gi``, ``500m`` or 2. Raises ValueError."""
    match = _QUANTITY.fullmatch(str(value))
    if match is None:
        raise ValueError(f"{value!r} is not a quantity such as 64Gi or 500m")
    number, exponent, suffix = match.groups()
    return Decimal(number).scaleb(int(exponent or 0)) * _SUFFIXES[suffix or ""]


def quantity_equal(left: object, right: object) -> bool:
    """Return whether two spellings mean the same amount; False if one of them is not a quantity."""
    try:
        return parse_quantity(left) == parse_quantity(right)
    except ValueError:
        return False


def parse_size(text: str) -> int:
    """Return the bytes of a size such as ``4Gi``, ``512Mi``, ``1.5G`` or ``1048576``.

    Raises ValueError. Its message recommends binary units only, although ``k``, ``M``, ``G`` and ``T`` are
    valid.
    """
    num_bytes = int(parse_quantity(text)) if re.fullmatch(SIZE_PATTERN, text) else 0
    if num_bytes <= 0:
        raise ValueError(
            f"{text!r} is not a size: write plain bytes, or a number with Ki, Mi, Gi or Ti, as in 4Gi"
        )
    return num_bytes


def format_size(num_bytes: float) -> str:
    """Format a size for messages and status, with at most two decimals: ``1.5Gi``."""
    num_bytes = round(num_bytes)
    for unit, factor in (("Ti", 2**40), ("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f}".rstrip("0").rstrip(".") + unit
    return str(num_bytes)


def format_mebibytes(num_bytes: int) -> str:
    """Format a size for a Kubernetes object. Rounds up to whole MiB: the object never gets less memory."""
    return f"{ceil_div(num_bytes, 2**20)}Mi"


def parse_seconds(text: str) -> int:
    """Return the seconds of a duration such as ``30s``, ``1h30m`` or ``7d``; 0 for other texts."""
    if not re.fullmatch(f"({_DURATION_PART})+", text):
        return 0
    return sum(int(number) * int(_SECONDS[unit]) for number, unit in re.findall(_DURATION_PART, text))


def format_seconds(seconds: float) -> str:
    """Format a duration in its unit, as kubectl does: ``12.3ms``, ``4.56s``, ``90m``, ``2.5h``, ``1,234d``.

    Minutes are whole, so that a status with a growing duration does not change with every second.
    """
    size = abs(seconds)
    unit = "ms" if 0 < size < 0.9995 else next((unit for unit in "dhm" if size >= 2 * _SECONDS[unit]), "s")
    number = seconds / _SECONDS[unit]
    if unit in ("ms", "s"):
        return f"{number:.3g}{unit}"
    return f"{number:,.0f}m" if unit == "m" else f"{number:,.1f}".removesuffix(".0") + unit


def seconds_in_words(seconds: float) -> str:
    """Return a duration for a sentence: ``1 second``, ``40 minutes``, ``1.5 hours``, ``3 days``."""
    units = (("day", 2 * 86400, 86400), ("hour", 3600, 3600), ("minute", 100, 60), ("second", 0, 1))
    unit, divisor = next((unit, divisor) for unit, least, divisor in units if seconds >= least)
    digits = 1 if unit == "hour" and seconds < 36_000 else 0
    number = f"{seconds / divisor:,.{digits}f}".removesuffix(".0")
    return f"{number} {unit}{'' if number == '1' else 's'}"


def ceil_div(number: int, divisor: int) -> int:
    """Return ``number / divisor``, rounded up."""
    return -(-number // divisor)


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``number``."""
    return ceil_div(number, multiple) * multiple
