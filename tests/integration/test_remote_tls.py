"""The remote tier over TLS: trusted certificates and error messages."""

import pytest

from lmcache_store.tiers.base import ObjectId
from lmcache_store.tiers.errors import TierUnavailableError
from lmcache_store.tiers.header import PART_BYTES
from lmcache_store.tiers.probing import num_leading
from testing.certificates import make_certificates
from testing.processes import BINARY, RedisProcess
from tests.harness.tiers.remote_objects import KEY, load, pattern, tier_of

pytestmark = [
    pytest.mark.redis,
    pytest.mark.skipif("valkey" in BINARY, reason="this valkey-server may be built without TLS"),
]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def other_certificates(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("others"))


@pytest.fixture
def server(certificates):
    with RedisProcess(tls=certificates) as server:
        yield server


@pytest.mark.parametrize("size", [0, 1, 16 << 10, PART_BYTES, 2 * PART_BYTES + 4097])
def test_stored_object_is_read_back_over_tls(server, certificates, size):
    remote, payload = tier_of(f"{server.url}?ca={certificates.ca}"), pattern(size)
    assert remote.store(ObjectId(KEY, 0), memoryview(payload))
    assert load(remote) == payload
    assert num_leading(remote, [KEY, KEY[::-1]], 1) == 1
    remote.touch([KEY], 1)
    remote.close()


def refusal(url: str, deadline: float = 60.0) -> str:
    remote = tier_of(url, deadline)
    with pytest.raises(TierUnavailableError) as caught:
        load(remote)
    assert remote.health.is_open
    remote.close()
    return str(caught.value)


def test_certificate_of_another_authority_is_refused(server, other_certificates):
    for url in (server.url, f"{server.url}?ca={other_certificates.ca}"):
        assert "certificate is refused" in refusal(url)


def test_certificate_of_another_name_is_refused_unless_verify_allows_it(certificates, tmp_path):
    named = make_certificates(tmp_path, "DNS:somebody.else")
    with RedisProcess(tls=named) as server:
        message = refusal(f"{server.url}?ca={named.ca}")
        assert "certificate is refused" in message
        assert "127.0.0.1" in message
        for verify in (f"verify=ca&ca={named.ca}", "verify=none"):
            remote = tier_of(f"{server.url}?{verify}")
            assert remote.store(ObjectId(KEY, 0), memoryview(b"x"))
            remote.close()
        assert "certificate is refused" in refusal(f"{server.url}?verify=ca&ca={certificates.ca}")


def test_client_certificate_is_sent_and_required(certificates, other_certificates):
    with RedisProcess(tls=certificates, tls_auth_clients="yes") as server:
        url = f"{server.url}?ca={certificates.ca}"
        remote = tier_of(f"{url}&cert={certificates.cert}&key={certificates.key}")
        assert remote.store(ObjectId(KEY, 0), memoryview(b"x"))
        remote.close()
        refusal(url)
        refusal(f"{url}&cert={other_certificates.cert}&key={other_certificates.key}")


@pytest.mark.parametrize("option", ["ca", "cert"])
@pytest.mark.parametrize("content", [None, "nonsense"])
def test_unreadable_certificate_file_is_named(server, tmp_path, option, content):
    path = tmp_path / "file.pem"
    if content:
        path.write_text(content)
    assert f"{path} can't be read" in refusal(f"{server.url}?{option}={path}")


def test_server_without_tls_is_refused(server):
    with RedisProcess() as plain:
        # The server stays silent.
        assert "TLS handshake" in refusal(plain.url.replace("redis://", "rediss://"), 2.0)
    refusal(server.url.replace("rediss://", "redis://"))
