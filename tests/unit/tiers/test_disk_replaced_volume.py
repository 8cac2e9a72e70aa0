"""A disk tier whose directory or volume is replaced while the tier runs."""

import shutil
import subprocess

import pytest

from lmcache.tiers.disk.tier import DiskTier
from lmcache.tiers.errors import DiskError, TierUnavailableError
from tests.harness.disk_world import MIB, PAGE, content, load, open_tier, store, taken_bytes


def test_uses_recreated_directory_after_a_probe(path):
    tier = open_tier(path)
    store(tier, 1)
    store(tier, 2)
    shutil.rmtree(path)
    with pytest.raises(TierUnavailableError):
        store(tier, 3)
    path.mkdir()
    assert tier.health.probe()
    assert tier.indexed.wait(60)
    assert (load(tier, 1), tier.used_bytes) == (None, 0)
    assert store(tier, 2)
    assert load(tier, 2) == content(2, PAGE)
    assert tier.used_bytes == taken_bytes(path)
    with pytest.raises(DiskError, match="in use"):
        DiskTier(path, MIB)
    tier.close()
    tier = open_tier(path)
    assert load(tier, 2) == content(2, PAGE)
    tier.close()


def test_does_not_use_recreated_directory_of_another_tier(path):
    tier = open_tier(path)
    shutil.rmtree(path)
    with pytest.raises(TierUnavailableError):
        store(tier, 1)
    other = DiskTier(path, MIB)
    assert not tier.health.probe()
    other.close()
    assert tier.health.probe()
    tier.close()


def test_uses_remounted_volume_but_not_the_mount_point(volume):
    tier = open_tier(volume, 512 << 10)
    store(tier, 1)
    subprocess.run(["mount", "-o", "remount,ro", volume], check=True)
    subprocess.run(["umount", "-l", volume], check=True)
    with pytest.raises(TierUnavailableError):
        store(tier, 2)
    assert not tier.health.probe()
    assert list(volume.iterdir()) == []
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", volume], check=True)
    assert not tier.health.probe()  # too small
    subprocess.run(["umount", volume], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", volume], check=True)
    assert tier.health.probe()
    assert tier.indexed.wait(60)
    assert store(tier, 2)
    assert tier.used_bytes == taken_bytes(volume)
    tier.close()
