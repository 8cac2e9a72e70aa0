"""Sizes: as people write them, and counted in whole units. Pure."""

from __future__ import annotations

import re

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def parse_size(text: str) -> int:
    """Bytes of a Kubernetes-like quantity: ``4Gi``, ``512Mi``, ``1.5G``, ``1048576``. Raises ValueError."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)([kMGT]|[KMGT]i)?", text)
    num_bytes = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if num_bytes <= 0:
        raise ValueError(
            f"{text!r} is not a size: write plain bytes, or a number with Ki, Mi, Gi or Ti, as in 4Gi"
        )
    return num_bytes


def format_size(num_bytes: int) -> str:
    """The largest binary unit, with at most two digits after the point: ``1.5Gi``."""
    for unit, factor in (("Ti", 2**40), ("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f}".rstrip("0").rstrip(".") + unit
    return str(num_bytes)


def ceil_div(number: int, divisor: int) -> int:
    """How many times does the divisor go into the number, the last time maybe not whole?"""
    return -(-number // divisor)


def round_up(number: int, multiple: int) -> int:
    """Return the next multiple."""
    return ceil_div(number, multiple) * multiple
