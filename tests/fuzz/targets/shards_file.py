"""Any text of a shards file or a peers file is refused with the file's name, or is a list of servers.

Input: a flag that chooses the peers file, and the text. The text is short, because PyYAML's time grows
with the square of the number of open brackets. Only the operator writes these files.
"""

import math

from lmcache_sidecar.files.peers import PeersFile
from lmcache_sidecar.files.shards import read_shards
from lmcache_store.tiers.remote.address import Endpoint
from tests.fuzz.target import Target

PATH = "/list.yaml"


class PeersDouble:
    """A tier that takes a list of peers."""

    peers: list[Endpoint]

    def set_peers(self, peers: list[Endpoint]) -> None:
        self.peers = peers


def run(data: bytes) -> None:
    try:
        text = data[1:].decode()
    except UnicodeDecodeError:  # the sidecar reads the file as text
        return
    try:
        if data[:1] == b"\1":
            tier = PeersDouble()
            PeersFile(PATH, "", tier).use(text)
            servers = tier.peers
        else:
            shards = read_shards(PATH, text)
            assert shards.current
            assert math.isfinite(shards.until)
            servers = [*shards.current, *shards.previous]
    except ValueError as error:
        if not str(error).startswith(PATH):
            raise AssertionError("the message does not name the file") from error
        return
    assert all(isinstance(server, Endpoint) for server in servers)


TARGET = Target(run, max_bytes=1024)
