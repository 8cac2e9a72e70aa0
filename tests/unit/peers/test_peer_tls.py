"""Reads between peers over TLS."""

import contextlib
import shutil
import socket
import ssl

import pytest

from lmcache_sidecar.peer_server import server, session
from lmcache_store.common.timing import TIMING
from lmcache_store.tiers.remote.address import Tls
from lmcache_store.tiers.remote.stream import accept_tls
from testing.certificates import make_certificates
from testing.child_process import wait_until
from tests.harness.tiers.peer_rows import ask_for, connect, is_closed, load, reading, rows, serving

__all__ = ["rows"]

SIZE = 5 << 20


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    return tls_of(tmp_path_factory.mktemp("tls"))


def tls_of(folder):
    made = make_certificates(folder)
    return Tls(str(made.ca), str(made.cert), str(made.key))


@pytest.mark.parametrize(
    ("served", "trusted", "problem"),
    [
        pytest.param("ours", "", "", id="a client without TLS"),
        pytest.param("absent", "ours", "", id="a server without its certificate"),
        pytest.param("", "ours", "TLS handshake failed", id="a server without TLS"),
        pytest.param("other", "ours", "certificate is refused", id="another authority"),
    ],
)
def test_peers_without_the_right_certificate_are_refused(rows, tls, tmp_path, served, trusted, problem):
    (object_id,) = rows.add(1, bytes(SIZE))
    absent = Tls(*(str(tmp_path / f"absent {name}") for name in ("ca", "cert", "key")))
    sides = {"": None, "ours": tls, "other": tls_of(tmp_path), "absent": absent}
    with (
        serving(rows, tls=sides[served]) as (peer_server, peer),
        reading(peer, tls=sides[trusted], password="secret") as tier,
    ):
        assert load(tier, object_id, SIZE) is None
        (state,) = tier.servers()
        assert problem in state["problem"]
        if not problem:
            wait_until(lambda: peer_server.service.stats.refused_connections)


def test_renewed_certificate_is_used(rows, tls, tmp_path):
    (object_id,) = rows.add(1, bytes(SIZE))
    served = Tls(*(str(tmp_path / name) for name in ("ca", "cert", "key")))
    for part in ("ca", "cert", "key"):
        shutil.copy(getattr(tls_of(tmp_path / ".."), part), getattr(served, part))
    with serving(rows, tls=served) as (_, peer):
        with reading(peer, tls=tls) as tier:
            assert load(tier, object_id, SIZE) is None
        for part in ("ca", "cert", "key"):
            shutil.copy(getattr(tls, part), getattr(served, part))
        with reading(peer, tls=tls) as tier:
            assert load(tier, object_id, SIZE)


def test_end_of_a_connection_leaves_it_encrypted(tls):
    """A thread may be about to send when the server closes."""
    client, plain = socket.socketpair()
    client.close()
    with accept_tls(plain, tls) as connection:
        encryption = vars(connection)["_sslobj"]
        server._shut_down(connection)
        assert vars(connection)["_sslobj"] is encryption
        with pytest.raises(ssl.SSLError):
            connection.send(b"KV")


def test_handshake_has_a_deadline(rows, tls, monkeypatch):
    monkeypatch.setattr(TIMING, "peer_password_seconds", 0.2)
    with serving(rows, tls=tls) as (_, peer), connect(peer) as connection:
        assert is_closed(connection)


def test_client_that_stops_reading_loses_its_pin_and_may_go_on(rows, tls, monkeypatch):
    monkeypatch.setattr(TIMING, "peer_pin_seconds", 0.2)
    monkeypatch.setattr(session, "_STEP_SECONDS", 0.05)
    rows.add(1, bytes(SIZE))
    context = ssl.create_default_context(cafile=tls.ca)
    with contextlib.ExitStack() as stack:
        _, peer = stack.enter_context(serving(rows, tls=tls))
        plain = stack.enter_context(connect(peer))
        connection = stack.enter_context(context.wrap_socket(plain, server_hostname="127.0.0.1"))
        replies = stack.enter_context(connection.makefile("rb"))
        connection.sendall(ask_for(0))
        assert replies.read(int(replies.readline()[1:]) + 2)
        wait_until(lambda: not rows.pinned)
        connection.sendall(ask_for(1))
        assert replies.read(int(replies.readline()[1:]) + 2)
    assert rows.num_pins == 2
