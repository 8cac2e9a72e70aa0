"""Any text of a tenants file is refused with the file's name, or gives budgets within their limits.

Input: the text. It is short, because PyYAML's time grows with the square of the number of open brackets. Only
the operator writes this file. Salts are read from one empty folder, so that no input reads a device.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from unittest import mock

from lmcache_sidecar.config import read_text
from lmcache_sidecar.files import tenants
from lmcache_sidecar.files.tenants import MAX_DISK_BYTES, TenantsFile
from lmcache_store.tenant_names import DEFAULT_NAME, MAX_NAMED, is_name
from tests.fuzz.target import Target

PATH = "/tenants.yaml"


@contextlib.contextmanager
def opened() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="lmc-fuzz-") as folder:

        def read(path: str) -> str:
            return read_text(f"{folder}/{path.replace('..', '')}")

        with mock.patch.object(tenants, "read_text", read):
            yield


def run(data: bytes) -> None:
    try:
        text = data.decode()
    except UnicodeDecodeError:  # the sidecar reads the file as text
        return
    file = TenantsFile(PATH)
    before = file.salted.listed
    try:
        file.use(text)
    except ValueError as error:
        if not str(error).startswith(PATH) or file.salted.listed != before:
            raise AssertionError("the message does not name the file, or the file changed budgets") from error
        return
    file.add_namespace(bytes(32))
    assert file.resolve()
    default, *named = file.salted.listed
    assert default.name == DEFAULT_NAME
    assert len(named) <= MAX_NAMED
    assert len({budget.name for budget in named}) == len(named)
    assert all(is_name(budget.name) for budget in named)
    assert sum(budget.min_memory_percent for budget in file.salted.listed) <= 100
    for budget in file.salted.listed:
        assert 0 <= budget.min_memory_percent <= budget.memory_percent <= 100
        assert 0 <= budget.disk_bytes <= MAX_DISK_BYTES


TARGET = Target(run, max_bytes=1024, opened=opened)
