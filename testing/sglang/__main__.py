"""``python -m testing.sglang``: prepare everything that SGLang's engines need, once."""

import sys

from testing.engine.tiny_model import tiny_model
from testing.sglang import environment


def main() -> int:
    """Install SGLang, and generate the tests' model."""
    try:
        environment.prepare()
    except (FileNotFoundError, environment.InstallationError) as error:
        print(f"[sglang] {error}", file=sys.stderr)
        return 1
    tiny_model()
    return 0


if __name__ == "__main__":
    sys.exit(main())
