"""Let torch and vLLM choose their code as on a processor without AVX-512 and AMX.

Python imports this module when it starts with the folder on PYTHONPATH. ``make test-avx2`` puts it there.
That target also sets variables for torch's and oneDNN's own kernels (ATEN_CPU_CAPABILITY,
ONEDNN_MAX_CPU_ISA). vLLM asks ``torch.cpu`` instead, which reads the processor's features. The processor must
have AVX2.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_ABSENT = (
    "_is_avx512_supported",
    "_is_avx512_bf16_supported",
    "_is_vnni_supported",
    "_is_amx_tile_supported",
    "_is_amx_fp16_supported",
)


def _is_absent() -> bool:
    return False


class _TorchCpu(MetaPathFinder):
    """Loads ``torch.cpu`` as usual, and replaces its answers."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch.cpu":
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_replace(module: ModuleType) -> None:
            load(module)
            for name in _ABSENT:
                setattr(module, name, _is_absent)

        spec.loader.exec_module = load_and_replace  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _TorchCpu())
