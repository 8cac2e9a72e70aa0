"""Models of Hugging Face's hub, which SGLang downloads when it starts."""

import hashlib
import json
import time
from types import SimpleNamespace

import pytest

from lmcache.engines.errors import UnnamedError
from lmcache.engines.sglang import naming

CONFIG = json.dumps({"model_type": "llama"}).encode()


@pytest.fixture
def snapshot(tmp_path):
    """A snapshot in the hub's cache: links to blobs, which are named by hashes of their contents."""
    folder = tmp_path / "snapshots" / "revision"
    folder.mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    blob = tmp_path / "blobs" / hashlib.sha1(b"blob %d\0" % len(CONFIG) + CONFIG).hexdigest()
    blob.write_bytes(CONFIG)
    (folder / "config.json").symlink_to(blob)
    return folder


def read(folder, began):
    options = SimpleNamespace(
        model_path=str(folder), revision=None, download_dir=None, json_model_override_args="{}"
    )
    return naming.model_config(options, began)


def test_model_that_the_start_downloads_is_identified(snapshot):
    """The scheduler adds the weights to the folder of the configuration."""
    began = time.time() - 60
    assert read(snapshot, began) == {"model_type": "llama"}


def test_blob_that_was_overwritten_is_not_trusted(snapshot):
    (snapshot / "config.json").resolve().write_bytes(b"{}")
    with pytest.raises(UnnamedError, match="changed after the engine's start"):
        read(snapshot, time.time() - 60)


def test_file_that_the_hub_did_not_name_is_not_trusted(tmp_path):
    (tmp_path / "config.json").write_bytes(CONFIG)
    with pytest.raises(UnnamedError, match="changed after the engine's start"):
        read(tmp_path, time.time() - 60)
