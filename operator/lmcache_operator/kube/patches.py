"""Bodies of server-side apply."""

from __future__ import annotations

import json
from typing import Any

# With the charset, the client leaves the body alone. For the bare type it would re-encode it as ASCII.
APPLY_PATCH = "application/apply-patch+yaml; charset=utf-8"
# Characters that YAML reads differently from JSON: line breaks, unprintable ones and lone surrogates.
_ESCAPED_IN_YAML = {
    code: f"\\u{code:04x}"
    for code in (*range(0x7F, 0xA0), 0x2028, 0x2029, *range(0xD800, 0xE000), 0xFEFF, 0xFFFE, 0xFFFF)
}


def apply_patch(body: Any) -> str:
    """Encode plain data as JSON that is also valid YAML of the same value.

    JSON's escapes of surrogate pairs are not valid in YAML.
    """
    return json.dumps(body, ensure_ascii=False).translate(_ESCAPED_IN_YAML)
