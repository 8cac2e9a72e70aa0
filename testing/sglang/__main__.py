"""``python -m testing.sglang``: install what SGLang's engines need, once."""

import sys

from testing.packages import InstallationError
from testing.sglang import environment


def main() -> int:
    """Install SGLang. Returns the exit status."""
    try:
        environment.prepare()
    except (FileNotFoundError, InstallationError) as error:
        print(f"[sglang] {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
