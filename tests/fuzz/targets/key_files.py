"""Files of encryption keys with any names and contents are valid keys, or a message without any of them.

Input: for each file a flag, its name and its content (two bytes of length in front of each). With the flag,
the content begins with a text that no message may have.
"""

from lmcache_store.tiers.encryption.keys import KEY_BYTES, MAX_VERSION, parse_keys
from tests.fuzz.bytes_input import BytesInput
from tests.fuzz.target import Target

MARK = b"7e5ec4e7"


def run(data: bytes) -> None:
    source, files = BytesInput(data), dict[str, bytes]()
    while source.has_more and len(files) < 8:
        is_marked, name = source.flag(), source.sized().decode(errors="replace")
        files[name] = MARK * is_marked + source.sized()
    try:
        keys = parse_keys(files)
    except ValueError as error:
        if MARK.decode() in str(error) and MARK.decode() not in "".join(files):
            raise AssertionError("the message repeats a key") from error
        return
    assert keys.write_version == max(keys.by_version)
    assert all(0 < version <= MAX_VERSION for version in keys.by_version)
    assert all(len(key) == KEY_BYTES for key in keys.by_version.values())
    assert len(set(keys.by_version.values())) == len(keys.by_version)


TARGET = Target(run)
