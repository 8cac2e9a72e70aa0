"""What names weights, adapters and media: their content, and only if the engine can't have loaded another."""

import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from lmcache.engines.core.requests import Ticket
from lmcache.engines.errors import UnnamedError
from lmcache.engines.vllm import files
from lmcache.engines.vllm.extra_keys import ExtraKeyFinder

CHUNK = 64


@pytest.fixture
def model(tmp_path):
    """Two files, each longer than what is hashed at once."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("model-1", "model-2"):
        (folder / f"{name}.safetensors").write_bytes(name.encode() + bytes(3 << 20))
    return folder


def later():
    """An engine that starts after all that is written here."""
    return time.time() + 3600


def tick(folder):
    """Let the file system's clock, which is coarse, pass what was written so far; what time it is then."""
    probe = folder / "probe"
    probe.touch()
    before = probe.stat().st_ctime
    while probe.stat().st_ctime == before:
        probe.touch()
    return probe.stat().st_ctime


def test_weights_have_one_fingerprint_wherever_they_lie(model, tmp_path):
    model.rename(tmp_path / "elsewhere")
    model.mkdir()
    for file in (tmp_path / "elsewhere").iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    prints = {files.fingerprint(folder, later()) for folder in (model, tmp_path / "elsewhere")}
    assert len(prints) == 1


@pytest.mark.parametrize("place", [0, 5000, 1 << 20, (3 << 20) + 6], ids=["begin", "middle", "slice", "end"])
def test_a_change_of_any_byte_changes_it(model, place):
    before = files.fingerprint(model, later())
    with (model / "model-2.safetensors").open("r+b") as file:
        file.seek(place)
        file.write(b"x")
    assert files.fingerprint(model, later()) != before


def test_a_blob_s_name_is_its_hash(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    prints = set()
    for name in ("a" * 64, "b" * 64):
        (snapshot / "model.safetensors").unlink(missing_ok=True)
        (snapshot / "model.safetensors").symlink_to(f"../blobs/{name}")  # not even read
        prints.add(files.fingerprint(snapshot, 0))
    assert len(prints) == 2


def test_files_that_changed_after_the_engine_began_have_no_name(model):
    with pytest.raises(UnnamedError, match="changed after the engine's start"):
        files.fingerprint(model, files.process_began())


@pytest.mark.parametrize("change", ["content, with the old times", "link", "link in a link", "file beside"])
def test_no_change_goes_unnoticed(model, tmp_path, change):
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    inner.symlink_to("model")
    outer.symlink_to(inner)
    file = outer / "model-1.safetensors"
    began = tick(tmp_path)
    files.check_unchanged(file, began)
    if change == "content, with the old times":
        times = file.stat()
        file.write_bytes(b"x")
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    elif change == "file beside":
        (model / "model-3.safetensors").write_bytes(b"x")
    else:
        link = outer if change == "link" else inner
        target = os.readlink(link)
        link.unlink()
        link.symlink_to(target)
    with pytest.raises(UnnamedError, match="changed"):
        files.check_unchanged(file, began)


def test_a_process_begins_before_its_own_code_runs():
    assert time.time() - 3600 * 24 < files.process_began() < time.time()


def test_missing_weights_have_no_name(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UnnamedError, match="no safetensors files"):
            files.fingerprint(folder, later())


def request(lora_path=None, *features):
    lora = SimpleNamespace(lora_path=str(lora_path)) if lora_path is not None else None
    return SimpleNamespace(lora_request=lora, mm_features=list(features))


def hashed(finder, asked):
    """The extra keys as soon as all files are hashed."""
    finder.extra_keys(asked, CHUNK)
    for hashing in finder._adapters.values():
        hashing.result(60)
    return finder.extra_keys(asked, CHUNK)


def test_adapters(model):
    finder = ExtraKeyFinder(later())
    assert finder.extra_keys(request(), CHUNK) == ()
    assert hashed(finder, request("someone/repository")) is None
    assert hashed(ExtraKeyFinder(later()), request(model)) is None, (
        "without its rank and alpha it is not known"
    )
    prints = set()
    for rank in (8, 16):
        (model / "adapter_config.json").write_text(f'{{"r": {rank}}}')
        ((first_chunk, name),) = hashed(ExtraKeyFinder(later()), request(model))
        assert (first_chunk, len(name)) == (0, 32)
        prints.add(name)
    assert len(prints) == 2


def test_an_adapter_that_was_overwritten_is_not_cached_any_more(model, tmp_path):
    """The engine goes on with what it loaded, or has loaded it anew: nobody can tell."""
    (model / "adapter_config.json").write_text("{}")
    finder = ExtraKeyFinder(tick(tmp_path))
    assert hashed(finder, request(model))
    (model / "model-1.safetensors").write_bytes(b"new weights")
    assert finder.extra_keys(request(model), CHUNK) is None
    assert hashed(ExtraKeyFinder(finder._began), request(model)) is None


def test_an_adapter_is_hashed_elsewhere(model, monkeypatch):
    (model / "adapter_config.json").write_text("{}")
    gate, threads = threading.Event(), []

    def hash_slowly(folder, began):
        threads.append((threading.current_thread(), os.getpriority(os.PRIO_PROCESS, 0)))
        assert gate.wait(60)
        return "f"

    monkeypatch.setattr(files, "fingerprint", hash_slowly)
    finder = ExtraKeyFinder(later())
    for _ in range(3):
        assert finder.extra_keys(request(model), CHUNK) is None
    gate.set()
    assert hashed(finder, request(model))
    ((thread, niceness),) = threads
    assert thread is not threading.current_thread()
    assert niceness == 19
    assert thread.daemon, "it does not keep the engine from ending"


class Item(dict):
    """As much of vLLM's MultiModalKwargsItem."""

    def get_data(self):
        return dict(self)


def feature(identifier="i" * 64, offset=10, modality="image", **data):
    data = Item(data or {"pixels": torch.zeros(4, 4)})
    position = SimpleNamespace(offset=offset)
    return SimpleNamespace(identifier=identifier, data=data, mm_position=position, modality=modality)


def row_keys(finder, *features, num_chunks=3):
    extra_keys = finder.extra_keys(request(None, *features), CHUNK)
    ticket = Ticket("r", [], b"n" * 32)
    ticket.extra_keys = extra_keys
    return ticket.row_keys(0, [b"0", b"1", b"2"][:num_chunks])


def test_media_are_named_by_their_content_from_where_they_begin():
    plain = row_keys(ExtraKeyFinder())
    image = row_keys(ExtraKeyFinder(), feature(offset=70))
    other = row_keys(ExtraKeyFinder(), feature(offset=70, pixels=torch.ones(4, 4)))
    two = row_keys(ExtraKeyFinder(), feature(offset=70), feature("j" * 64, offset=130, pixels=torch.ones(2)))
    assert image == row_keys(ExtraKeyFinder(), feature(offset=70)), "in every process"
    assert plain[0] == image[0] == other[0] == two[0], "text in front is shared"
    assert image[1] == two[1], "the next turn brings another image"
    assert len({plain[1], image[1], other[1]}) == 3
    assert len({plain[2], image[2], other[2], two[2]}) == 4


def test_a_store_of_later_chunks_has_the_keys_that_a_lookup_has():
    ticket = Ticket("r", [], b"n" * 32, "salt")
    ticket.extra_keys = ((0, b"L"), (1, b"M"))
    whole = ticket.row_keys(0, [b"0", b"1", b"2"])
    assert ticket.row_keys(0, [b"1", b"2"], first_chunk=1) == whole[1:]


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
def test_what_differs_anywhere_is_another_medium(data):
    assert row_keys(ExtraKeyFinder(), feature(**data)) != row_keys(ExtraKeyFinder(), feature())
    assert row_keys(ExtraKeyFinder(), feature(modality="video")) != row_keys(ExtraKeyFinder(), feature())


def test_media_without_a_name_of_their_own_are_not_cached():
    def extra_keys(*features, finder=None):
        return (finder or ExtraKeyFinder()).extra_keys(request(None, *features), CHUNK)

    assert extra_keys(feature("renderer0-mm-1-image-0")) is None, "a counter"
    assert extra_keys(feature(data=object())) is None
    gone = feature()
    gone.data = None
    assert extra_keys(gone) is None, "it is in another process's cache"


def test_an_identifier_that_clients_give_to_two_contents_is_not_cached():
    """The engine looks its encoder's outputs up by identifier: one content could get the other's."""
    finder = ExtraKeyFinder()
    mine, yours = feature("my picture"), feature("my picture", pixels=torch.ones(4, 4))
    assert finder.extra_keys(request(None, mine), CHUNK)
    assert finder.extra_keys(request(None, yours), CHUNK) is None
    assert finder.extra_keys(request(None, mine), CHUNK) is None
    assert finder.extra_keys(request(None, feature("another")), CHUNK)


def test_an_item_is_digested_once_and_forgotten_with_it(monkeypatch):
    finder, asked = ExtraKeyFinder(), feature()
    first = finder.extra_keys(request(None, asked), CHUNK)
    monkeypatch.setattr("lmcache.engines.vllm.extra_keys._item_digest", None)
    assert finder.extra_keys(request(None, asked), CHUNK) == first
    del asked
    assert finder._media == {}
