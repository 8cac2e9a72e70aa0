"""Stand-ins for modules of SGLang, which the unit tests do not need."""

import sys
from types import ModuleType

import pytest


@pytest.fixture
def give_module(monkeypatch):
    """``give_module(name, **content)``: let an import of a module of SGLang find this content."""

    def give(name: str, **content: object) -> ModuleType:
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
        package, _, last_name = name.rpartition(".")
        if package:
            setattr(sys.modules.get(package) or give(package), last_name, module)
        return module

    return give
