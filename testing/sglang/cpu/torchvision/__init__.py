"""Names of torchvision, without its code.

SGLang imports torchvision when it starts, for models with images. The project's environment lacks it, because
vLLM on CPUs does not need it. These modules have every name that a program asks for. Text models use none of
them, and tests with them prove nothing about models with images.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0.0.0"


class _AnyName(type):
    """The type of a class that has every class attribute, such as ``InterpolationMode.BICUBIC``."""

    def __getattr__(cls, name: str) -> str:
        return f"{cls.__name__}.{_public(name)}"


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _AnyName(_public(name), (), {})


class _Modules(MetaPathFinder, Loader):
    """Makes an empty module for each name below ``torchvision``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_below = fullname.startswith(f"{__name__}.")
        return ModuleSpec(fullname, self, is_package=True) if is_below else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty."""


def _public(name: str) -> str:
    if name.startswith("__"):
        raise AttributeError(name)
    return name


sys.meta_path.append(_Modules())
