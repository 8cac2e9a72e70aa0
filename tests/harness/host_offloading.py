"""vLLM's tiered offloading for an engine with KV in host memory, where vLLM's own worker refuses to run.

Everything else is vLLM's: the connector, the scheduler side, the managers, and the region of the tiers.
"""

import numpy as np
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostWorker(OffloadingWorker):
    """Copies immediately. It has one KV group. A row holds the blocks of a chunk, tensor by tensor."""

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
        """Pairs of a page in the engine's KV and its part of a row, for all blocks."""
        (first,) = blocks.block_indices
        for position, block in enumerate(blocks.block_ids):
            chunk, index = divmod(first % self._blocks_per_chunk + position, self._blocks_per_chunk)
            row, start = self._rows[chunks.block_ids[chunk]], 0
            for pages in self._pages:
                size = pages.shape[1]
                yield pages[block], row[start + index * size : start + (index + 1) * size]
                start += size * self._blocks_per_chunk


class HostTieringSpec(TieringOffloadingSpec):
    """The ``spec_name`` of an engine with one rank."""

    def get_worker(self, kv_caches):
        if not self._worker:
            # Version 0.29 calls a chunk of the region a block.
            unit = "chunk" if hasattr(self, "num_chunks") else "block"
            sizes = {
                f"num_{unit}s": getattr(self, f"num_{unit}s"),
                f"kv_bytes_per_{unit}": self.kv_bytes_per_chunk,
            }
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                rank=0,
                cpu_page_size=self.cpu_page_size_per_worker,
                **sizes,
            )
            self._worker = HostWorker(kv_caches, region, self.blocks_per_chunk)
        return self._worker
