"""Kubernetes quantities: "64Gi", "500m", "2"."""

from __future__ import annotations

import re
from decimal import Decimal

BYTES_PATTERN = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$"

_SUFFIXES = {"n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "": Decimal(1)}
_SUFFIXES |= {suffix: Decimal(1000) ** power for power, suffix in enumerate("kMGTPE", 1)}
_SUFFIXES |= {f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", 1)}
_QUANTITY = re.compile(
    r"^([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:[eE]([+-]?[0-9]{1,2}))?([numkMGTPE]|[KMGTPE]i)?$"
)


def parse_quantity(value: object) -> Decimal:
    """Return the number a quantity stands for.

    Raises:
        ValueError: this is not a quantity.
    """
    match = _QUANTITY.match(str(value))
    if match is None:
        raise ValueError(f"{value!r} is not a quantity such as 64Gi or 500m")
    number, exponent, suffix = match.groups()
    return Decimal(number).scaleb(int(exponent or 0)) * _SUFFIXES[suffix or ""]


def quantity_equal(left: object, right: object) -> bool:
    """Whether two spellings mean the same amount; False if one of them is no quantity."""
    try:
        return parse_quantity(left) == parse_quantity(right)
    except ValueError:
        return False


def format_mebibytes(num_bytes: int) -> str:
    """Bytes as a quantity, rounded up to whole MiB."""
    return f"{-(-num_bytes // 2**20)}Mi"
