"""vLLM with the GPU code of one architecture: 340 MB of wheel become about 20 MB.

The extensions of vLLM's wheel use PyTorch's stable ABI, so they also load in older versions of torch than the
wheel demands. What an in-process ``LLM`` with a Llama model does not need is left out.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from tools.gpu_bundle import fatbin

OMITTED = (
    "vllm/vllm-rs",
    "vllm/third_party/deep_gemm",
    "vllm/third_party/fmha_sm100",
    "vllm/third_party/tml_fa4",
    "vllm/_fl*",
    "vllm/_deepselect*",
    "vllm/_qutlass*",
    "vllm/kernels/helion/configs",
    "**/swagger-ui*",
    "**/*.jpg",
    "**/*.cu",
    "*.dist-info/RECORD",
)
"""Programs, and kernels for other models and number formats."""
FLASH_ATTENTION_2, FLASH_ATTENTION_3 = (f"vllm/vllm_flash_attn/_vllm_fa{n}_C.abi3.so" for n in (2, 3))
_KERNELS = "vllm/_C_stable_libtorch.abi3.so"
_MOE_KERNELS = "vllm/_moe_C_stable_libtorch.abi3.so"
_HOPPER = 90
_REPLACEMENT_ARCHITECTURE = 75  # no supported GPU has it, and _C_stable_libtorch has small images for it


def is_needed_by_flash_attention_3(kernel: str) -> bool:
    """Whether a model in bfloat16 with heads of 64 or 128 uses this kernel (mangled name)."""
    if "FlashAttnFwdCombine" in kernel or "prepare_varlen" in kernel:
        return True
    head = re.search(r"EEELi(?:64|128)EN[0-9A-Z]*_10bfloat16_tE", kernel)  # size of a head of V
    return bool(head) and "ILi192EEEEEELi" not in kernel  # heads of K have 192 there


def is_needed_by_flash_attention_2(kernel: str) -> bool:
    """Whether a model in bfloat16 with heads of 64 or 128 uses this kernel (mangled name)."""
    return bool(re.search(r"kernel_traitsILi(?:64|128)E.*10bfloat16_tE", kernel))


def cut(folder: Path, architecture: int, say: Callable[[str], None]) -> None:
    """Remove what is not needed from an unpacked wheel of vLLM.

    Args:
        folder: The folder that holds ``vllm/``.
        architecture: 90 for compute capability 9.0.
        say: Prints a line of progress.
    """
    for pattern in OMITTED:
        for path in list(folder.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    used, unused = FLASH_ATTENTION_2, FLASH_ATTENTION_3
    is_needed = is_needed_by_flash_attention_2
    if architecture == _HOPPER:
        used, unused, is_needed = unused, used, is_needed_by_flash_attention_3
    (folder / unused).unlink()
    replacement = fatbin.smallest_image((folder / _KERNELS).read_bytes(), _REPLACEMENT_ARCHITECTURE)
    for name in (_KERNELS, _MOE_KERNELS, used):
        path = folder / name
        pruned = fatbin.prune(
            path.read_bytes(),
            architecture,
            replacement,
            is_needed if name == used else lambda _kernel: True,
        )
        path.unlink()  # the file may be a link to the one in uv's cache, which must not change
        path.write_bytes(pruned.content)
        remaining, dropped = pruned.remaining_bytes >> 20, pruned.dropped_bytes >> 20
        say(f"{path.name}: {remaining} MiB of GPU code remain, {dropped} MiB are removed")
