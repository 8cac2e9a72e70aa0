"""The password of the remote tier never appears in a log, and is read again after a rotation."""

import logging

import pytest

from lmcache_store.tiers.errors import TierUnavailableError
from testing.child_process import ProcessDied
from testing.processes import RedisProcess, SidecarProcess
from tests.harness.engine import session_of, store
from tests.harness.tiers.remote_objects import KEY, answering, load, probe, tier_of

SECRETS = ("us3r", "S3cr3t")


@pytest.mark.parametrize(
    "answer",
    [
        "-ERR unknown command 'AUTH', with args beginning with: 'us3r' 'S3cr3t' \r\n",
        "-ERR unknown command `AUTH us3r S3cr3t`\r\n",
        "-WRONGPASS no such pair: us3r, S3cr3t\r\n",
        "-S3cr3t is not the password\r\n",
        "AUTH us3r S3cr3t\r\n",
        "$S3cr3t\r\n",
    ],
)
def test_credentials_echoed_by_a_server_are_not_logged(caplog, answer):
    caplog.set_level(logging.DEBUG)
    with answering(answer.encode()) as address:
        remote = tier_of(f"redis://us3r:S3cr3t@{address}")
        with pytest.raises(TierUnavailableError, match="AUTH") as caught:
            load(remote)
        assert not probe(remote)
        assert "AUTH" in caplog.text
        assert not any(secret in caplog.text + repr(caught.value) for secret in SECRETS)
        remote.close()


def test_payloads_and_keys_echoed_by_a_server_are_not_logged(caplog):
    answer = f"-ERR unknown command 'GET', with args beginning with: '{KEY.hex()}' \r\n"
    with answering(answer.encode()) as address:
        remote = tier_of(f"redis://{address}", 3.0)  # the server answers only once
        with pytest.raises(TierUnavailableError, match="unknown command 'GET'") as caught:
            load(remote)
        assert KEY.hex() not in caplog.text + repr(caught.value)
        remote.close()


@pytest.mark.redis
def test_sidecar_logs_no_credentials_that_redis_echoes(tmp_path):
    (tmp_path / "conf").write_text('rename-command AUTH ""\n')
    with RedisProcess(include=tmp_path / "conf") as server:
        url = f"redis://us3r:S3cr3t@127.0.0.1:{server.port}"
        with SidecarProcess(remote_url=url, log_level="debug") as sidecar:
            sidecar.wait_until(lambda stats: not stats["remote"]["is_reachable"])
            assert "ERR was the answer to AUTH" in sidecar.log
            pages = sidecar.log + sidecar.get("/stats") + sidecar.get("/metrics")
            assert not any(secret in pages for secret in SECRETS)


@pytest.mark.redis
def test_sidecar_reads_a_rotated_password_file_again(tmp_path):
    file = tmp_path / "password"
    file.write_text("old\n")
    with RedisProcess(password="new") as server:
        options = {"remote_url": f"redis://127.0.0.1:{server.port}", "remote_password_file": file}
        with SidecarProcess(**options) as sidecar:
            sidecar.wait_until(lambda stats: not stats["remote"]["is_reachable"])
            assert "WRONGPASS was the answer to AUTH" in sidecar.log
            with session_of(sidecar) as session:
                store(session, 1)
                file.write_text("new\n")
                sidecar.wait_until(lambda stats: stats["remote"]["written"] == 1)
                file.unlink()  # the secret is being replaced: open connections stay in use
                store(session, 2)
                sidecar.wait_until(lambda stats: stats["remote"]["written"] == 2)


@pytest.mark.redis
def test_sidecar_with_stay_up_serves_until_its_secret_appears(tmp_path):
    """A pod that was created before the password was declared lacks the file."""
    file = tmp_path / "secret" / "password"
    with RedisProcess(password="new") as server:
        options = {"remote_url": f"redis://127.0.0.1:{server.port}", "remote_password_file": file}
        with pytest.raises(ProcessDied), SidecarProcess(**options):
            pass
        with SidecarProcess(stay_up="true", **options) as sidecar, session_of(sidecar) as session:
            store(session, 1)
            sidecar.wait_until(lambda stats: not stats["remote"]["is_reachable"])
            assert sidecar.stats()["is_ready"]
            assert f"--remote-password-file: {file} can't be read: no such file" in sidecar.log
            file.parent.mkdir()
            file.write_text("new\n")
            sidecar.wait_until(lambda stats: stats["remote"]["written"] == 1)
