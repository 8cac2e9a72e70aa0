"""Names of weights, adapters and media by content, if the engine cannot have loaded different content."""

import contextlib
import os
import re
import shutil
import threading
import time
from concurrent import futures
from types import SimpleNamespace

import pytest
import torch

from lmcache_client.core import files
from lmcache_client.core.requests import Ticket
from lmcache_client.errors import UnnamedError
from lmcache_client.vllm.extra_keys import _CLOCK_SECONDS, ExtraKeyFinder
from testing.child_process import wait_until

CHUNK = 64


@pytest.fixture
def model(tmp_path):
    """A model or adapter of files that are longer than a hashed slice."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("model-1", "model-2", "adapter_model"):
        (folder / f"{name}.safetensors").write_bytes(name.encode() + bytes(3 << 20))
    return folder


def late_start_time():
    """A start time of the engine that is later than all writes of a test."""
    return time.time() + 3600


def next_filesystem_time(folder):
    """Wait until the file system's coarse clock is later than all writes, and return its time."""
    probe = folder / "probe"
    probe.touch()
    before = probe.stat().st_ctime
    while probe.stat().st_ctime == before:
        probe.touch()
    return probe.stat().st_ctime


def test_fingerprint_does_not_depend_on_the_folder(model, tmp_path):
    copied = shutil.copytree(model, tmp_path / "elsewhere")
    assert len({files.fingerprint(folder, late_start_time()) for folder in (model, copied)}) == 1


@pytest.mark.parametrize("offset", [0, 5000, 1 << 20, (3 << 20) + 6], ids=["begin", "middle", "slice", "end"])
def test_fingerprint_changes_with_any_byte(model, offset):
    before = files.fingerprint(model, late_start_time())
    with (model / "model-2.safetensors").open("r+b") as file:
        file.seek(offset)
        file.write(b"x")
    assert files.fingerprint(model, late_start_time()) != before


def test_fingerprint_uses_the_hash_in_the_name_of_a_blob(tmp_path):
    fingerprints = set()
    for name in ("a" * 64, "b" * 64):
        (tmp_path / "model.safetensors").unlink(missing_ok=True)
        (tmp_path / "model.safetensors").symlink_to(f"../blobs/{name}")  # the file is not read
        fingerprints.add(files.fingerprint(tmp_path, 0))
    assert len(fingerprints) == 2


def test_files_changed_after_the_engine_start_are_refused(model):
    # real time: the kernel reports the start
    assert time.time() - 3600 * 24 < files.process_start_time() < time.time()
    with pytest.raises(UnnamedError, match="changed after the engine's start"):
        files.fingerprint(model, files.process_start_time())


@pytest.mark.parametrize("change", ["content, with the old times", "link", "link in a link", "added file"])
def test_check_unchanged_detects_every_change(model, tmp_path, change):
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    inner.symlink_to("model")
    outer.symlink_to(inner)
    file = outer / "model-1.safetensors"
    start_time = next_filesystem_time(tmp_path)
    files.check_unchanged(file, start_time)
    if change == "content, with the old times":
        times = file.stat()
        file.write_bytes(b"x")
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    elif change == "added file":
        (model / "model-3.safetensors").write_bytes(b"x")
    else:
        link = outer if change == "link" else inner
        target = os.readlink(link)
        link.unlink()
        link.symlink_to(target)
    with pytest.raises(UnnamedError, match="changed"):
        files.check_unchanged(file, start_time)


def test_missing_weights_are_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UnnamedError, match="no safetensors files"):
            files.fingerprint(folder, late_start_time())


def request(lora_path=None, *features):
    lora = adapter(lora_path) if lora_path is not None else None
    return SimpleNamespace(lora_request=lora, mm_features=list(features))


def adapter(path, number=1, **fields):
    return SimpleNamespace(lora_path=str(path), lora_name="mine", lora_int_id=number, **fields)


def refused(finder, lora_request, reason):
    """Wait until all files are hashed, and check why the request is not cached."""
    for _ in range(2):
        with pytest.raises(UnnamedError) as error:
            finder.extra_keys(lora_request, CHUNK)
        futures.wait(finder._adapters.values(), 60)
    assert re.search(reason, str(error.value))


def extra_keys_after_hashing(finder, lora_request):
    """Wait until all files are hashed, and return the extra keys."""
    with contextlib.suppress(UnnamedError):  # unless its files are hashed at once
        finder.extra_keys(lora_request, CHUNK)
    futures.wait(finder._adapters.values(), 60)
    return finder.extra_keys(lora_request, CHUNK)


def test_adapter_name_covers_weights_and_config(model):
    finder = ExtraKeyFinder(late_start_time())
    assert finder.extra_keys(request(), CHUNK) == ()
    refused(
        finder,
        request("someone/repository"),
        "adapter mine can't be identified: someone/repository is no folder",
    )
    refused(finder, request(model), "adapter_config.json")  # with rank and alpha
    fingerprints = set()
    for rank in (8, 16):
        (model / "adapter_config.json").write_text(f'{{"r": {rank}}}')
        ((first_chunk, name),) = extra_keys_after_hashing(ExtraKeyFinder(late_start_time()), request(model))
        assert (first_chunk, len(name)) == (0, 32)
        fingerprints.add(name)
    assert len(fingerprints) == 2


def test_adapter_whose_weights_are_no_safetensors_is_not_cached(model):
    (model / "adapter_config.json").write_text("{}")
    (model / "adapter_model.safetensors").rename(model / "adapter_model.bin")
    refused(ExtraKeyFinder(late_start_time()), request(model), "vLLM loads no safetensors file in ")


@pytest.mark.parametrize(
    "options",
    [{"target_modules": ["o_proj"]}, {"lora_dtype": torch.float16}, {"enable_moe_shared_loras": True}],
    ids=lambda options: next(iter(options)),
)
def test_adapter_name_covers_the_options_with_which_the_engine_applies_it(model, options):
    (model / "adapter_config.json").write_text("{}")
    configs = {}, options
    finders = [ExtraKeyFinder(late_start_time(), SimpleNamespace(**config)) for config in configs]
    requests = request(model), SimpleNamespace(lora_request=adapter(model, is_3d_lora_weight=True))
    names = {extra_keys_after_hashing(finder, each) for finder in finders for each in requests}
    assert len(names) == 4


def test_overwritten_adapter_is_not_cached(model, tmp_path):
    """The engine may use the old or the new weights."""
    (model / "adapter_config.json").write_text("{}")
    finder = ExtraKeyFinder(next_filesystem_time(tmp_path))
    assert extra_keys_after_hashing(finder, request(model))
    (model / "model-1.safetensors").write_bytes(b"new weights")
    for each in (finder, ExtraKeyFinder(finder._began)):
        refused(each, request(model), "adapter mine can't be identified: .* changed after the engine's start")


def test_adapter_that_was_loaded_while_the_engine_runs_is_cached_until_it_changes(model, monkeypatch):
    config = model / "adapter_config.json"
    config.write_text("{}")
    finder = ExtraKeyFinder(0.0)  # the engine started long ago
    wait_until(lambda: config.stat().st_ctime < time.time() - _CLOCK_SECONDS, what="the adapter is complete")
    assert finder.note_load(adapter(model)) is False
    names = {extra_keys_after_hashing(finder, request(model))}
    finder.note_load(adapter(model))  # the engine loads it again
    names.add(finder.extra_keys(request(model), CHUNK))
    assert len(names) == 1
    monkeypatch.setattr(files, "check_unchanged", lambda *_: None)  # a server of files with another clock
    (model / "model-1.safetensors").write_bytes(b"new weights")
    refused(finder, request(model), "changed after the engine loaded it")
    finder.note_load(adapter(model))
    refused(finder, request(model), "changed after the engine loaded it")  # vLLM may have KV of both


def test_adapter_whose_requests_precede_its_load_must_be_older_than_the_engine(model):
    (model / "adapter_config.json").write_text("{}")
    finder = ExtraKeyFinder(0.0)
    assert finder.extra_keys_of(request(model), CHUNK)
    finder.note_load(adapter(model))
    refused(finder, request(model), "changed after the engine's start")


def test_adapter_that_was_loaded_in_place_is_not_cached(model, tmp_path):
    (model / "adapter_config.json").write_text("{}")
    finder = ExtraKeyFinder(late_start_time())
    assert extra_keys_after_hashing(finder, request(model))
    assert finder.note_load(adapter(tmp_path / "missing", load_inplace=True)) is True
    refused(finder, request(model), "adapter mine can't be identified: it was loaded in place")
    other = SimpleNamespace(lora_request=adapter(model, number=2))
    assert finder.extra_keys(other, CHUNK)
    finder.note_load(adapter(model, number=2))
    finder.note_load(adapter(tmp_path / "missing", number=2, load_inplace=True))
    refused(finder, SimpleNamespace(lora_request=adapter(model, number=3)), "it was loaded in place")


def test_folder_that_was_loaded_in_place_is_not_cached(model, tmp_path):
    """Running requests of the old adapter make vLLM load it again, also for those of the new one."""
    (model / "adapter_config.json").write_text("{}")
    finder = ExtraKeyFinder(late_start_time())
    finder.note_load(adapter(tmp_path / "missing", load_inplace=True))
    finder.note_load(adapter(model, load_inplace=True))
    finder.note_load(adapter(model, number=2))
    refused(finder, SimpleNamespace(lora_request=adapter(model, number=2)), "it was loaded in place")


def test_adapter_that_was_missing_at_its_first_load_is_cached_after_the_next(model):
    finder, config = ExtraKeyFinder(0.0), model / "adapter_config.json"
    finder.note_load(adapter(model))
    config.write_text("{}")
    wait_until(lambda: config.stat().st_ctime < time.time() - _CLOCK_SECONDS, what="the adapter is complete")
    finder.note_load(adapter(model))
    assert extra_keys_after_hashing(finder, request(model))


def test_adapter_is_hashed_in_a_background_thread(model, monkeypatch):
    (model / "adapter_config.json").write_text("{}")
    gate, threads = threading.Event(), []

    def hash_slowly(folder, began):
        threads.append((threading.current_thread(), os.getpriority(os.PRIO_PROCESS, 0)))
        assert gate.wait(60)
        return "f"

    monkeypatch.setattr(files, "fingerprint", hash_slowly)
    finder = ExtraKeyFinder(late_start_time())
    for _ in range(3):
        with pytest.raises(
            UnnamedError, match="adapter mine can't be identified: its files are being hashed"
        ):
            finder.extra_keys(request(model), CHUNK)
    gate.set()
    futures.wait(finder._adapters.values(), 60)
    assert finder.extra_keys(request(model), CHUNK)
    ((thread, niceness),) = threads
    assert thread is not threading.current_thread()
    assert (niceness, thread.daemon) == (19, True), "the thread must not block the engine's exit"


class Item(dict):
    """The used part of vLLM's MultiModalKwargsItem."""

    def get_data(self):
        return dict(self)


def feature(identifier="i" * 64, offset=10, modality="image", **data):
    data = Item(data or {"pixels": torch.zeros(4, 4)})
    position = SimpleNamespace(offset=offset)
    return SimpleNamespace(identifier=identifier, data=data, mm_position=position, modality=modality)


def row_keys(finder, *features):
    ticket = Ticket("r", [], b"n" * 32)
    ticket.extra_keys = finder.extra_keys(request(None, *features), CHUNK)
    return ticket.row_keys(0, [b"0", b"1", b"2"])


def test_media_change_keys_from_their_position():
    text_only = row_keys(ExtraKeyFinder())
    image = row_keys(ExtraKeyFinder(), feature(offset=70))
    other_image = row_keys(ExtraKeyFinder(), feature(offset=70, pixels=torch.ones(4, 4)))
    two_images = row_keys(
        ExtraKeyFinder(), feature(offset=70), feature("j" * 64, offset=130, pixels=torch.ones(2))
    )
    assert image == row_keys(ExtraKeyFinder(), feature(offset=70)), "keys must be equal in every process"
    assert len({keys[0] for keys in (text_only, image, other_image, two_images)}) == 1, "before the image"
    assert image[1] == two_images[1], "a later image must not change earlier chunks"
    assert len({text_only[1], image[1], other_image[1]}) == 3
    assert len({text_only[2], image[2], other_image[2], two_images[2]}) == 4


def test_row_keys_of_later_chunks_equal_those_of_all_chunks():
    ticket = Ticket("r", [], b"n" * 32, "salt")
    ticket.extra_keys = ((0, b"L"), (1, b"M"))
    all_keys = ticket.row_keys(0, [b"0", b"1", b"2"])
    assert ticket.row_keys(0, [b"1", b"2"], first_chunk=1) == all_keys[1:]


@pytest.mark.parametrize(
    "data",
    [
        {"pixels": torch.zeros(16)},
        {"pixels": torch.zeros(4, 4, dtype=torch.int32)},
        {"pixels": [torch.zeros(2, 4), torch.zeros(2, 4)]},
        {"pixels": torch.zeros(4, 4), "grid": 1},
        {"pixels": torch.zeros(4, 4), "grid": "1"},
        {"pixels": torch.zeros(4, 4), "grid": [1]},
        {"pixel": torch.zeros(4, 4)},
    ],
    ids=str,
)
def test_any_difference_in_media_changes_the_keys(data):
    assert row_keys(ExtraKeyFinder(), feature(**data)) != row_keys(ExtraKeyFinder(), feature())
    assert row_keys(ExtraKeyFinder(), feature(modality="video")) != row_keys(ExtraKeyFinder(), feature())


def test_media_without_content_identifier_are_not_cached():
    counted, unknown, evicted = feature("renderer0-mm-1-image-0"), feature(data=object()), feature()
    evicted.data = None  # it is in another process's cache
    for item in (counted, unknown, evicted):
        refused(ExtraKeyFinder(), request(None, item), "a medium")


def test_identifier_with_two_contents_is_not_cached():
    """The engine looks up encoder outputs by identifier, so different contents could be confused."""
    finder = ExtraKeyFinder()
    first_picture, second_picture = feature("my picture"), feature("my picture", pixels=torch.ones(4, 4))
    assert finder.extra_keys(request(None, first_picture), CHUNK)
    refused(finder, request(None, second_picture), "a medium")
    refused(finder, request(None, first_picture), "a medium")
    assert finder.extra_keys(request(None, feature("another")), CHUNK)


def test_item_digest_is_cached_for_the_lifetime_of_the_item(monkeypatch):
    finder, item = ExtraKeyFinder(), feature()
    first_keys = finder.extra_keys(request(None, item), CHUNK)
    monkeypatch.setattr("lmcache_client.vllm.extra_keys._item_digest", None)
    assert finder.extra_keys(request(None, item), CHUNK) == first_keys
    del item
    assert finder._media == {}
