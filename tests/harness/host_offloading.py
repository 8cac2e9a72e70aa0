"""vLLM's tiered offloading for an engine whose KV is in host memory: its own worker refuses to run there.

All else is vLLM's: connector, scheduler side, managers and the region that tiers read and write.
"""

from __future__ import annotations

import numpy as np
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostWorker(OffloadingWorker):
    """Copies at once. One KV group; a row holds the blocks of a chunk, one tensor after the other."""

    def __init__(self, kv_caches, region, blocks_per_chunk):
        (refs,) = kv_caches.group_data_refs
        self._pages = [
            kv_caches.tensors[ref.tensor_idx].tensor.numpy().view(np.uint8)[:, : ref.page_size_bytes]
            for ref in refs
        ]
        self._region = region
        self._rows = np.asarray(region.create_kv_memoryview()).view(np.uint8)
        self._blocks_per_chunk = blocks_per_chunk
        self._ended = []

    def submit_store(self, job_id, src_spec, dst_spec):
        for page, slot in self._pairs(src_spec, dst_spec):
            slot[:] = page
        self._ended.append(TransferResult(job_id, True))
        return True

    def submit_load(self, job_id, src_spec, dst_spec):
        for page, slot in self._pairs(dst_spec, src_spec):
            page[:] = slot
        self._ended.append(TransferResult(job_id, True))
        return True

    def get_finished(self):
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids):
        pass

    def shutdown(self):
        del self._rows
        self._region.cleanup()

    def _pairs(self, blocks, chunks):
        """(page in the engine's KV, its place in a row) of all blocks."""
        (first,) = blocks.block_indices
        for position, block in enumerate(blocks.block_ids):
            chunk, place = divmod(first % self._blocks_per_chunk + position, self._blocks_per_chunk)
            row, at = self._rows[chunks.block_ids[chunk]], 0
            for pages in self._pages:
                size = pages.shape[1]
                yield pages[block], row[at + place * size : at + (place + 1) * size]
                at += size * self._blocks_per_chunk


class HostTieringSpec(TieringOffloadingSpec):
    """``spec_name`` of an engine of one rank."""

    def get_worker(self, kv_caches):
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostWorker(kv_caches, region, self.blocks_per_chunk)
        return self._worker
