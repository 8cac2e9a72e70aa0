"""Objects as files in one directory, which one process uses at a time.

The path is ``<namespace>/<first two digits of the key>/<key>.<column>``, in hexadecimal except for the
column. The key is the chunk key, or a hash of the row key if the file is encrypted. Paths are computed, so an
object is found without an index. ``file_formats.py`` describes the content of a file. It is written under a
name that ends in ``.tmp``, and renamed when it is complete.

**O_DIRECT** is used if the volume supports it and the caller's memory is aligned (slots of an arena are). On
a virtual SSD, it writes objects of 4 and 32 MiB at a steady 2.2-3.5 GB/s, the page cache at 0.4-2.2 GB/s.
Reads are as fast, except for data in the page cache. Such data would be a second copy of the memory tier's
data. Other memory goes through the page cache. The files are the same. Encrypted files always use O_DIRECT.

All paths are relative to the directory's descriptor. When its volume is unmounted, nothing is written below
the mount point. ``reopen`` switches to a directory that was created again in its place. An invalid file
raises InvalidObjectError, and a file whose key version is absent KeyAbsentError. Errors of the operating
system propagate.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Iterator

from lmcache_store.common.units import round_up
from lmcache_store.tiers.base import Loaded, ObjectId, StoredId, split_row_key
from lmcache_store.tiers.disk.file_formats import EncryptedFiles, FileFormat, PlainFiles
from lmcache_store.tiers.encryption.pieces import Cipher
from lmcache_store.tiers.errors import DirectoryInUseError, DiskError, InvalidObjectError, KeyAbsentError
from lmcache_store.tiers.pages import PAGE_BYTES, blank_pages

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers of a full volume or quota."""
MAX_SHARE = 0.9
"""Largest part of a volume that a tier may take: other users need space, and nearly full file systems are
slow."""

_FOLDER = re.compile(r"[0-9a-f]{64}|[0-9a-f]{2}")
_FILE = re.compile(r"\./([0-9a-f]{64})/([0-9a-f]{2})/(\2[0-9a-f]{62})\.(0|[1-9][0-9]{0,8})(\.[0-9]+\.tmp)?")
_CHECK_ID = ObjectId(b"\xff" * 64, 0xFFFF_FFFF)  # a column number that no object has
_ABSENT = (FileNotFoundError, NotADirectoryError)
_NOT_A_FILE = frozenset({errno.ELOOP, errno.EACCES, errno.ENXIO, errno.EINVAL})


def path_of(stored_id: StoredId) -> str:
    """Return the path of an object in the directory. ``stored_id``: see ``Directory.stored_id``."""
    namespace, key = split_row_key(stored_id.row_key)
    text = key.hex()
    return f"{namespace.hex()}/{text[:2]}/{text}.{stored_id.column}"


class Directory:
    """The directory of a disk tier. Thread-safe. Raises DirectoryInUseError if another process uses it.

    With a cipher, all files are encrypted.
    """

    def __init__(self, path: str, cipher: Cipher | None = None) -> None:
        self.path = path
        self._cipher = cipher
        self._format: FileFormat = EncryptedFiles(cipher) if cipher else PlainFiles()
        os.makedirs(path, exist_ok=True)
        self._mount_point = _mount_point(path)
        try:
            self._root = self._open_root(0)
        except BlockingIOError:
            raise DirectoryInUseError(
                f"{path} is in use by another process: give each process its own directory"
            ) from None

    def reopen(self, least_bytes: int) -> bool:
        """Switch to the directory that is at the path now, after a new mount or a new directory there.

        Returns False if it is the same directory, or if the volume is not mounted. Raises OSError, changing
        nothing, for example if the volume is smaller than ``least_bytes``.
        """
        present, known = os.stat(self.path), os.fstat(self._root)
        is_same = (present.st_dev, present.st_ino) == (known.st_dev, known.st_ino)
        if is_same or _mount_point(self.path) != self._mount_point:
            return False
        root = self._open_root(least_bytes)
        os.dup2(root, self._root, inheritable=False)  # atomic: threads open files relative to it
        os.close(root)
        return True

    def _open_root(self, least_bytes: int) -> int:
        root = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(root, fcntl.LOCK_EX | fcntl.LOCK_NB)
            volume = os.fstatvfs(root)
            if volume.f_blocks * volume.f_frsize < least_bytes:
                raise OSError(errno.ENOSPC, "the volume is too small for the tier")
            # The scan ignores pages of checks, because other threads write them meanwhile.
            shutil.rmtree(split_row_key(_CHECK_ID.row_key)[0].hex(), ignore_errors=True, dir_fd=root)
        except BaseException:
            os.close(root)
            raise
        self.volume_bytes = volume.f_blocks * volume.f_frsize
        self._block_bytes = max(PAGE_BYTES, volume.f_frsize)
        self._direct = os.O_DIRECT  # 0: the volume does not support it
        return root

    def close(self) -> None:
        """Release the directory for other processes. Later operations of a stuck thread fail."""
        root, self._root = self._root, -1  # the kernel may reuse the descriptor's number
        os.close(root)

    def check(self) -> None:
        """Write a page, read it and delete it. Raises OSError on failure. A full volume is healthy.

        Raises NoKeyError while the cipher has no key."""
        if self._cipher is not None:
            self._cipher.check()
        page = blank_pages(1)
        try:
            stored_id = self.stored_id(_CHECK_ID)
            self.publish(self.write(_CHECK_ID, page, b""), stored_id)
            self.read(_CHECK_ID, page)
            self.remove(stored_id)
        except InvalidObjectError as invalid:
            raise OSError(errno.EIO, f"the test page was not read as written: {invalid}") from None
        except OSError as error:
            if error.errno == errno.EINVAL and self._direct:
                self._direct = 0
                self.check()
            elif error.errno not in FULL:
                raise

    def object_bytes(self, length: int) -> int:
        """Return the bytes of the volume that the object of a payload takes."""
        return self._taken_bytes(self._format.num_bytes(length))

    def _taken_bytes(self, file_bytes: int) -> int:
        return round_up(max(1, file_bytes), self._block_bytes)

    def stored_id(self, object_id: ObjectId) -> StoredId:
        """Return the name of an object's file."""
        return self._format.stored_id(object_id)

    def contains(self, stored_id: StoredId) -> bool:
        """Does a file of this object exist?"""
        try:
            status = os.stat(path_of(stored_id), dir_fd=self._root, follow_symlinks=False)
        except _ABSENT:
            return False
        return stat.S_ISREG(status.st_mode)

    def read(self, object_id: ObjectId, into: memoryview, length: int | None = None) -> Loaded | None:
        """Read and verify an object. Returns None if there is none.

        An object whose payload does not have ``length`` bytes is invalid."""
        fd = self._open(object_id, self._direct_flag(into))
        if fd is None:
            return None
        try:
            return self._format.read(fd, object_id, into, length)
        finally:
            os.close(fd)

    def is_readable(self, object_id: ObjectId) -> bool:
        """Is there a file of this object that can be read, with a key that is here? No payload is read."""
        fd = None
        try:
            fd = self._open(object_id, self._direct)
            return fd is not None and self._format.is_readable(fd, object_id)
        except (InvalidObjectError, KeyAbsentError):
            return False
        except OSError as error:
            if error.errno == errno.EIO:  # a bad block: another file can take its place
                return False
            raise
        finally:
            if fd is not None:
                os.close(fd)

    def write(self, object_id: ObjectId, payload: memoryview, label: bytes, part_digests: bytes = b"") -> str:
        """Write an object under a temporary name, and return that name."""
        temporary = f"{path_of(self.stored_id(object_id))}.{threading.get_ident()}.tmp"
        fd = self._create(temporary, self._direct_flag(payload))
        try:
            self._format.write(fd, object_id, payload, label, part_digests)
            os.utime(fd, ns=_now())  # a tick of the kernel's clock is longer than a small write
        except BaseException:
            self._delete(temporary)
            raise
        finally:
            os.close(fd)
        return temporary

    def publish(self, temporary: str, stored_id: StoredId) -> None:
        """Rename a written object to its final name."""
        try:
            os.rename(temporary, path_of(stored_id), src_dir_fd=self._root, dst_dir_fd=self._root)
        except BaseException:
            self._delete(temporary)
            raise

    def refresh(self, stored_id: StoredId) -> bool:
        """Set an object's time of use. False: there is none."""
        try:
            os.utime(path_of(stored_id), ns=_now(), dir_fd=self._root, follow_symlinks=False)
        except _ABSENT:
            return False
        return True

    def remove(self, stored_id: StoredId) -> bool:
        """Delete an object. False: there is none."""
        try:
            os.unlink(path_of(stored_id), dir_fd=self._root)
        except (*_ABSENT, IsADirectoryError):
            return False
        return True

    def scan(self) -> Iterator[tuple[StoredId, int, int]]:
        """Yield all objects, in no order: name, bytes of the volume, time of last use in nanoseconds.

        Deletes temporary files, which a crashed process left; no thread may be writing. Opens no file.
        """
        for path, folders, files, folder in os.fwalk(".", dir_fd=self._root, onerror=_raise_if_unhealthy):
            folders[:] = filter(_FOLDER.fullmatch, folders)
            for file in files:
                match = _FILE.fullmatch(f"{path}/{file}")
                if not match:
                    continue
                namespace, _, key, column, is_temporary = match.groups()
                if is_temporary:
                    self._delete(f"{path}/{file}")
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(file, dir_fd=folder, follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        stored_id = StoredId(ObjectId(bytes.fromhex(namespace + key), int(column)))
                        yield stored_id, self._taken_bytes(status.st_size), status.st_mtime_ns

    def _open(self, object_id: ObjectId, direct: int) -> int | None:
        """Open an object's file; None: there is none. Raises InvalidObjectError if it is not a file."""
        # Do not wait for a pipe of this name, and do not follow a link.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | direct
        try:
            return os.open(path_of(self.stored_id(object_id)), flags, dir_fd=self._root)
        except _ABSENT:
            return None
        except OSError as error:
            if error.errno in _NOT_A_FILE:
                raise InvalidObjectError("type") from None
            raise

    def _create(self, path: str, direct: int) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | direct
        try:
            return os.open(path, flags, 0o600, dir_fd=self._root)
        except FileNotFoundError:
            folder = os.path.dirname(path)
            for part in (os.path.dirname(folder), folder):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=self._root)
            return os.open(path, flags, 0o600, dir_fd=self._root)

    def _delete(self, path: str) -> None:
        with contextlib.suppress(OSError):  # the next scan tries again
            os.unlink(path, dir_fd=self._root)

    def _direct_flag(self, memory: memoryview) -> int:
        return self._direct if self._format.is_aligned(memory) else 0


def open_directory(path: str, capacity_bytes: int, cipher: Cipher | None) -> Directory:
    """Open the directory of a tier that may take ``capacity_bytes``. Raises DiskError."""
    try:
        with contextlib.ExitStack() as on_error:
            directory = Directory(path, cipher)
            on_error.callback(directory.close)
            if cipher is None or not cipher.problem:
                directory.check()
            if capacity_bytes > MAX_SHARE * directory.volume_bytes:
                raise DiskError(
                    f"{capacity_bytes} bytes are more than {MAX_SHARE:.0%} of the volume of {path} "
                    f"({directory.volume_bytes} bytes): reduce the disk tier or increase the volume"
                )
            on_error.pop_all()
            return directory
    except OSError as error:
        raise DiskError(f"{path} can't hold a disk tier: {error}") from error


def _mount_point(path: str) -> str:
    """Return the mount point of a directory's volume."""
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return path


def _now() -> tuple[int, int]:
    return time.time_ns(), time.time_ns()


def _raise_if_unhealthy(error: OSError) -> None:
    if not isinstance(error, (*_ABSENT, PermissionError)):
        raise error
