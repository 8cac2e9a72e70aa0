"""Settings of the launcher: its environment, and the command line of vLLM."""

from __future__ import annotations

import hmac
import ipaddress
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lmcache_client.group.channel import LEADER, PartIdentity
from lmcache_store.common import options

MAX_NODES = 32
_RPC_PORT, _MASTER_PORT = 29550, 29501
"""Ports on which the leader's vLLM waits for the other parts: vLLM's defaults in all releases."""
_MIN_SECRET_BYTES = 16
_EXIT_SECONDS = 15.0
"""Time for vLLM's processes to exit after they have finished their requests."""


class Settings(NamedTuple):
    """Settings of one part."""

    identity: PartIdentity
    leader: str
    """DNS name or address of the leader's pod."""
    port: int
    address: str
    """IP address of this pod."""
    secret_file: Path
    command: tuple[str, ...]
    num_ranks: int
    """Data-parallel ranks of each part; 0: the engine has a single one, which spans all parts."""
    ready_port: int
    """Port that is open while this part serves."""
    server_port: int
    """Port of vLLM's server."""
    notice_seconds: float
    """Time to serve after the port has closed."""
    drain_seconds: float
    """Time for vLLM to finish its requests and to exit."""

    @property
    def is_headless(self) -> bool:
        """Whether vLLM has no server in this part, because its server is in the leader's."""
        return not self.num_ranks and self.identity.rank != LEADER

    def key(self) -> bytes:
        """Read the secret, which may change, and return the group's key. Raises ValueError.

        The groups of a cluster have one secret, and the key depends on the leader's name. So a part whose DNS
        server still has the address of a former pod joins no other group.
        """
        try:
            secret = self.secret_file.read_bytes().strip()
        except OSError as error:
            raise ValueError(f"cannot read {self.secret_file}: {error.strerror}") from None
        if len(secret) < _MIN_SECRET_BYTES:
            raise ValueError(f"{self.secret_file}: the secret needs {_MIN_SECRET_BYTES} bytes or more")
        return hmac.digest(secret, self.leader.encode(), "sha256")

    def command_with(self, address: str) -> list[str]:
        """Return vLLM's command with the options of this part. ``address``: IP address of the leader."""
        rank, nodes, *_ = self.identity
        if not self.num_ranks:
            master = f"--master-addr={address}", f"--master-port={_MASTER_PORT}"
            place = f"--nnodes={nodes}", f"--node-rank={rank}", *master
            # The user may have set another number of servers, with which vLLM refuses to be headless.
            serverless = ["--headless", "--api-server-count=0"] if self.is_headless else []
            return [*self.command, *place, *serverless]
        first_rank = rank * self.num_ranks
        leader = [f"--data-parallel-address={address}", f"--data-parallel-rpc-port={_RPC_PORT}"]
        if self.num_ranks == 1:
            # vLLM would turn hybrid load balancing into this, and fail for dense models without a reason.
            return [*self.command, *leader, f"--data-parallel-rank={first_rank}"]
        ranks = f"--data-parallel-size-local={self.num_ranks}", f"--data-parallel-start-rank={first_rank}"
        return [*self.command, *leader, *ranks, "--data-parallel-hybrid-lb"]


def read(environ: Mapping[str, str], arguments: Sequence[str]) -> Settings:
    """Read the settings of a part. Raises ValueError, whose message names the setting."""

    def value(name: str, reader: options.ValueReader = str) -> Any:
        if not (text := environ.get(name)):
            raise ValueError(f"{name} is not set")
        try:
            return reader(text)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    port = options.number(int, 1, 65535, "a port from 1 to 65535")
    nodes = value("LMCACHE_GROUP_NODES", options.number(int, 2, MAX_NODES, f"a number from 2 to {MAX_NODES}"))
    rank = value("LMCACHE_GROUP_RANK", options.number(int, 0, nodes - 1, f"a rank from 0 to {nodes - 1}"))
    seconds = options.number(float, 0, 1e6, "a number of seconds")
    if arguments[:1] != ["--"] or not arguments[1:]:
        raise ValueError("usage: python3 -m lmcache_client.group -- vllm serve MODEL [OPTION ...]")
    if shutil.which(arguments[1]) is None:
        raise ValueError(f"the command {arguments[1]} is not in PATH, or is not executable")
    revision = "".join(environ.get("LMCACHE_GROUP_REVISION", "").split()) or "-"  # one word on the wire
    settings = Settings(
        identity=PartIdentity(rank, nodes, revision, socket.gethostname()),
        leader=value("LMCACHE_GROUP_LEADER"),
        port=value("LMCACHE_GROUP_PORT", port),
        address=str(value("VLLM_HOST_IP", ipaddress.ip_address)),
        secret_file=Path(value("LMCACHE_GROUP_SECRET_FILE")),
        command=tuple(arguments[1:]),
        num_ranks=value("LMCACHE_GROUP_RANKS", options.number(int, 0, 1024, "a number of ranks")),
        ready_port=value("LMCACHE_GROUP_READY_PORT", port),
        server_port=value("LMCACHE_GROUP_SERVER_PORT", port),
        notice_seconds=value("LMCACHE_GROUP_NOTICE_SECONDS", seconds),
        drain_seconds=value("LMCACHE_GROUP_SHUTDOWN_SECONDS", seconds) + _EXIT_SECONDS,
    )
    settings.key()
    return settings
