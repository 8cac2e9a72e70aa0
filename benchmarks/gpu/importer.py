"""A process that opens GPU memory of another one, like the sidecar's reader, under other conditions:
``python -m benchmarks.gpu.importer``.

It reads requests from its input and answers each, as JSON lines. The first request is the user id to change
to, 0 for none. The others are ``{"handle": hex}``: the answer has the code of the driver, and the digest of
the memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys

import numpy as np

from lmcache_client.cuda.driver import Device
from lmcache_client.cuda.errors import CudaError
from lmcache_client.cuda.ipc import Mappings


def main() -> None:
    import cuda.bindings.driver  # noqa: F401 - another user may not be able to read the installed packages

    uid = json.loads(sys.stdin.readline())
    if uid:
        os.setgid(uid)
        os.setuid(uid)
    context = Device.visible()[0].primary_context()
    mappings = Mappings(context)
    mapping = None
    _answer(pid=os.getpid(), uid=os.getuid())
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if mapping is None:
                mapping = mappings.open(bytes.fromhex(request["handle"]))
            content = np.zeros(mapping.num_bytes, np.uint8)
            context.call("cuMemcpyDtoH", content.ctypes.data, mapping.base, content.nbytes)
            _answer(code=0, digest=hashlib.sha256(content.tobytes()).hexdigest())
        except CudaError as error:
            _answer(code=error.code, problem=str(error))


def _answer(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main()
