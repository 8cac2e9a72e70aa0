"""The launcher as a program. Its exit status is vLLM's, 1 after the loss of another part, or 2."""

import asyncio
import os
import sys

from lmcache_client.group.launcher import Launcher
from lmcache_client.group.part import Exit
from lmcache_client.group.settings import read
from lmcache_store.common import logs


def main() -> Exit:
    """Run until the end, and return the exit status with the last line."""
    logs.set_up("text", "INFO")
    try:
        settings = read(os.environ, sys.argv[1:])
    except ValueError as error:
        return Exit(2, f"error: {error}")
    loop = asyncio.new_event_loop()
    return loop.run_until_complete(Launcher(settings, loop).run())


if __name__ == "__main__":
    status, cause = main()
    print(cause, file=sys.stderr, flush=True)
    # A thread that still resolves a name would delay the normal end of Python.
    os._exit(status)
