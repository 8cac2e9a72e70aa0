"""One Attach stream, from its connection to its end.

Two threads serve the stream. The client's thread reads the replies. A thread of gRPC pulls the requests, and
maps new extents before the first copies need them (an earlier copy causes the page faults itself). The
engine's threads make the unary calls of the resulting session.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias, cast

import grpc
import numpy as np
import numpy.typing as npt

import lmcache_store
from lmcache_client.cuda.pin_status import PinStatus
from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_client.rpc import service
from lmcache_client.rpc.errors import SidecarUnavailableError
from lmcache_client.rpc.hello import ClientHello
from lmcache_client.rpc.open_copies import OpenCopies
from lmcache_client.rpc.session import SidecarSession, StoreCopier
from lmcache_store.common.timing import TIMING
from lmcache_store.tiers.memory.mapping import MappedColumn, MappedIndex
from lmcache_store.tiers.memory.slots import ENTRY_BYTES

_POPULATE_BYTES = 256 << 20
"""Bytes that are mapped at once, in a few 10 ms. Between two of these steps the stream can send."""

_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", service.MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # a new attempt is a new connection, without gRPC's own back-off
    ("grpc.enable_http_proxy", 0),
]


OnRows: TypeAlias = Callable[[npt.NDArray[np.uint8], int, bool], None]
"""Called with a worker's column, its number of ready rows, and whether no older column is in use."""


class Attachment:
    """One stream and its session. Call ``run`` once. Any thread may call ``cancel`` at any time to end it."""

    def __init__(
        self,
        socket_path: str,
        hello: pb.Hello,
        copies: OpenCopies,
        pending_releases: set[str],
        on_rows: OnRows | None = None,
    ) -> None:
        """``on_rows``: see ``SidecarClient``."""
        self._on_rows = on_rows
        self._socket_path = socket_path
        self._hello = hello
        self._copies = copies
        self._pending_releases = pending_releases
        self._stream: Any = None
        self._changed = threading.Condition()  # protects the fields below
        self._epoch = 0
        self._column: MappedColumn | None = None
        self._ready_rows = 0
        self._mapped_rows = 0
        self._drained = False
        self._round = 0  # number of the sidecar's request to give up rows, until it is answered
        self._pins: PinStatus | None = None
        self._reported_pins: PinStatus | None = None
        self._over = False
        self._reason = ""  # why this client ended the stream

    def run(self, on_session: Callable[[SidecarSession], None]) -> None:
        """Attach, pass the session to ``on_session``, and return when the stream has ended.

        Raises:
            grpc.RpcError: the sidecar refused the client, or the connection was lost.
            SidecarUnavailableError: ``cancel`` was called with a reason.
            ArenaError, OSError: the arena can't be mapped.
        """
        with grpc.insecure_channel(f"unix:{self._socket_path}", options=_CHANNEL_OPTIONS) as channel:
            attach = channel.stream_stream(
                service.ATTACH_PATH,
                request_serializer=pb.AttachRequest.SerializeToString,
                response_deserializer=pb.AttachReply.FromString,
            )
            self._stream = stream = cast(Any, attach(self._requests()))
            silence = f"the sidecar did not answer within {TIMING.hello_seconds:g} s: is it frozen?"
            attach_timeout = threading.Timer(TIMING.hello_seconds, self.cancel, [silence])
            attach_timeout.daemon = True
            attach_timeout.start()
            try:
                if self._over:  # ``cancel`` was called before the stream existed
                    return
                attached = next(stream).attached
                attach_timeout.cancel()
                session = self._begin(channel, attached)
                try:
                    on_session(session)
                    for reply in stream:
                        if reply.WhichOneof("message") == "copier":
                            session.store_copier = StoreCopier.of(reply.copier)
                        else:
                            self._extend(reply.extents)
                finally:
                    self._copies.finish(session)
            except grpc.RpcError as error:
                if self._reason:
                    raise SidecarUnavailableError(self._reason) from error
                raise
            finally:
                attach_timeout.cancel()
                self.cancel()

    def cancel(self, reason: str = "") -> None:
        """End the stream, for a reason that ``run`` reports."""
        with self._changed:
            self._reason = self._reason or ("" if self._over else reason)
            self._over = True
            self._changed.notify()
        if self._stream is not None:
            self._stream.cancel()

    def report_pins(self, status: PinStatus) -> None:
        """Report how much memory is pinned, if the sidecar understands such reports."""
        with self._changed:
            self._pins = status
            self._changed.notify()

    def wake(self) -> None:
        """Check again whether the copies of older sessions have ended."""
        with self._changed:
            self._changed.notify()

    def _begin(self, channel: grpc.Channel, attached: pb.Attached) -> SidecarSession:
        path = Path(attached.arena_path)
        if not path.exists():  # this container mounts the directory elsewhere
            path = Path(self._socket_path).parent / path.name
        num_rows, table = attached.num_rows, attached.table_offset
        column = None
        if self._hello.role == pb.ROLE_WORKER:
            column = MappedColumn(
                path, table, attached.column_offset, attached.slot_bytes, num_rows, attached.slots_per_frame
            )
        first_table = table - self._hello.column * num_rows * ENTRY_BYTES  # the index refers to column 0
        index = MappedIndex(path, first_table, num_rows, attached.index_offset, attached.index_buckets)
        with self._changed:
            self._epoch, self._column = attached.epoch, column
        self._extend(pb.Extents(ready_rows=attached.ready_rows))
        return SidecarSession(
            channel,
            self._hello.client_uuid,
            attached,
            column,
            index,
            self._copies,
            on_stale=self.cancel,
            pending_releases=self._pending_releases,
        )

    def _extend(self, extents: pb.Extents) -> None:
        with self._changed:
            if extents.round:
                self._copies.mark()  # later copies use no row after the ready ones
            self._ready_rows = max(extents.ready_rows, 0 if extents.round else self._ready_rows)
            self._round = extents.round
            self._changed.notify()

    def _requests(self) -> Iterator[pb.AttachRequest]:
        """Yield all messages of the client on this stream."""
        yield pb.AttachRequest(hello=self._hello)
        duties = self._must_drain, self._must_release_extents, self._must_populate, self._must_report_pins
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._over or any(is_due() for is_due in duties))
                if self._over:
                    return
            if self._must_drain():
                self._drained = True
                yield pb.AttachRequest(drained=pb.Drained(epoch=self._epoch))
                continue
            if self._must_report_pins():
                yield pb.AttachRequest(pinned=self._pinned_message())
                continue
            try:
                round_ = self._release_extents() if self._must_release_extents() else self._populate()
            except Exception as error:  # gRPC would report only "Exception iterating requests!"
                return self.cancel(str(error))
            if round_:
                yield pb.AttachRequest(extents_released=pb.ExtentsReleased(round=round_))

    def _release_extents(self) -> int:
        """Stop using rows that are not ready. Return the round of the sidecar's request."""
        with self._changed:
            round_, self._round = self._round, 0
            self._mapped_rows = min(self._mapped_rows, self._ready_rows)
        self._report_rows()
        return round_

    def _populate(self) -> int:
        """Map some more rows. Return 0, because there is no round to answer."""
        ready_rows = self._ready_rows
        if self._column is not None and self._mapped_rows < ready_rows:
            rows_at_once = max(1, _POPULATE_BYTES // self._column.slots.shape[1])
            end = min(ready_rows, self._mapped_rows + rows_at_once)
            self._column.populate(self._mapped_rows, end)
            self._mapped_rows = end
            self._report_rows()
        return 0

    def _report_rows(self) -> None:
        if self._on_rows is not None and self._column is not None:
            self._on_rows(self._column.slots, self._mapped_rows, self._drained)

    def _pinned_message(self) -> pb.Pinned:
        self._reported_pins = status = self._pins or PinStatus()
        return pb.Pinned(**status._asdict() | {"problem": service.shortened(status.problem)})

    def _must_report_pins(self) -> bool:
        return self._epoch > 0 and self._pins != self._reported_pins

    def _must_release_extents(self) -> bool:
        return self._round > 0 and self._drained and self._copies.are_marked_closed

    def _must_drain(self) -> bool:
        return self._epoch > 0 and not self._drained and self._copies.is_drained

    def _must_populate(self) -> bool:
        return self._column is not None and self._mapped_rows < self._ready_rows


def hello_message(hello: ClientHello, client_uuid: bytes) -> pb.Hello:
    """Return the Hello message of a client."""
    fields = asdict(hello)
    groups = [group | {"kind": group["kind"].value} for group in fields.pop("groups")]
    geometry = {name: fields.pop(name) for name in ("chunk_tokens", "num_columns")}
    texts = {name: service.shortened(fields[name]) for name in ("model", "private_reason")}  # may have paths
    return pb.Hello(
        protocol_version=service.PROTOCOL_VERSION,
        client_version=lmcache_store.__version__,
        client_uuid=client_uuid,
        pid=os.getpid(),
        uid=os.getuid(),
        geometry=pb.Geometry(groups=groups, **geometry),
        **fields | texts | {"role": hello.role.value},
    )
