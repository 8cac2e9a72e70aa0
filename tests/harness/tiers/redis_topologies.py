"""Connected servers: a master with a replica under a Sentinel, and a Redis Cluster."""

import contextlib
import subprocess
from collections.abc import Iterator, Sequence

import redis

from testing.certificates import Certificates
from testing.child_process import free_port, wait_until
from testing.processes import BINARY, RedisProcess

SERVICE = "kv-cache"


class Sentinel:
    """One Sentinel, which decides alone and within half a second."""

    def __init__(self, master: RedisProcess, *, password: str = "") -> None:
        self.port = free_port()
        self.client = redis.Redis(port=self.port, password=password or None)
        config = master.folder / "sentinel.conf"
        auth = f"sentinel auth-pass {SERVICE} {master.password}\n" if master.password else ""
        require_password = f"requirepass {password}\n" if password else ""
        config.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {master.folder}\n{require_password}"
            f"sentinel monitor {SERVICE} 127.0.0.1 {master.port} 1\n{auth}"
            f"sentinel down-after-milliseconds {SERVICE} 300\n"
            f"sentinel failover-timeout {SERVICE} 2000\n"
        )
        with (master.folder / "sentinel.log").open("ab") as log:
            self._process = subprocess.Popen([BINARY, config, "--sentinel"], stdout=log, stderr=log)
        wait_until(self._knows_a_replica)

    def _knows_a_replica(self) -> bool:
        with contextlib.suppress(redis.ConnectionError):
            replicas = self.client.execute_command("SENTINEL", "REPLICAS", SERVICE)
            return len(replicas) == 1 and replicas[0][b"master-link-status"] == b"ok"
        return False

    def close(self) -> None:
        self.client.close()
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def sentinel_set(password: str = "") -> Iterator[tuple[Sentinel, RedisProcess, RedisProcess]]:
    """A Sentinel, and a master with a synchronised replica."""
    options = {"repl_diskless_sync_delay": 0, **({"masterauth": password} if password else {})}
    with (
        RedisProcess(password=password, **options) as master,
        RedisProcess(password=password, **options) as replica,
    ):
        replica.client.replicaof("127.0.0.1", master.port)
        wait_until(lambda: replica.client.info("replication")["master_link_status"] == "up")
        with contextlib.closing(Sentinel(master, password=password)) as sentinel:
            yield sentinel, master, replica


class Cluster:
    """``nodes[:3]`` own a third of the slots each. ``nodes[3]`` is the replica of ``nodes[0]``."""

    def __init__(self, nodes: Sequence[RedisProcess]) -> None:
        self.nodes = nodes
        bounds = [0, 5461, 10923, 16384]
        for index, node in enumerate(nodes):
            node.client.execute_command(
                "CLUSTER", "MEET", "127.0.0.1", nodes[0].port, nodes[0].options["cluster_port"]
            )
            if index < 3:
                node.client.execute_command("CLUSTER", "ADDSLOTSRANGE", bounds[index], bounds[index + 1] - 1)
        wait_until(lambda: all(self._is_complete(node) for node in nodes))
        nodes[3].client.execute_command("CLUSTER", "REPLICATE", self.id_of(0))
        wait_until(lambda: nodes[3].client.info("replication").get("master_link_status") == "up")
        wait_until(lambda: all("slave" in self._view(node) for node in nodes))

    @property
    def url(self) -> str:
        scheme = "rediss-cluster" if self.nodes[0].tls else "redis-cluster"
        return f"{scheme}://127.0.0.1:{self.nodes[1].port},127.0.0.1:{self.nodes[0].port}"

    def id_of(self, index: int) -> str:
        return str(self.nodes[index].client.execute_command("CLUSTER", "MYID").decode())

    def set_slot(self, index: int, slot: int, *words: str) -> None:
        self.nodes[index].client.execute_command("CLUSTER", "SETSLOT", slot, *words)

    def owner_of(self, slot: int) -> int:
        return next(index for index, last in enumerate((5460, 10922, 16383)) if slot <= last)

    @staticmethod
    def _view(node: RedisProcess) -> str:
        return str(node.client.execute_command("CLUSTER NODES"))

    @staticmethod
    def _is_complete(node: RedisProcess) -> bool:
        info = node.client.execute_command("CLUSTER INFO")
        return bool(info["cluster_known_nodes"] == "4" and info["cluster_state"] == "ok")


@contextlib.contextmanager
def cluster(tls: Certificates | None = None) -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        options = {"cluster_enabled": "yes", "cluster_node_timeout": 500, "repl_diskless_sync_delay": 0}
        if tls:
            options |= {"tls_cluster": "yes", "tls_replication": "yes"}
        nodes = [RedisProcess(tls=tls, cluster_port=free_port(), **options) for _ in range(4)]
        yield Cluster([stack.enter_context(node) for node in nodes])
