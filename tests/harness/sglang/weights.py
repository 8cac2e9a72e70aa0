"""Fakes of SGLang's classes that change weights and empty caches."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from lmcache_client.sglang.weights import _UPDATES, install

NAMESPACE, ENGINE = b"n" * 32, b"e" * 16
MANAGERS = "sglang.srt.managers"
COMPONENTS = "sglang.srt.managers.scheduler_components"
RUNNER = "sglang.srt.model_executor.model_runner_components.weight_updater"
CHECKER = "sglang.srt.utils.weight_checker"


class UpdateError(Exception):
    """An update or a flush of the fake engine failed."""


def make_classes():
    """SGLang's two classes, over an engine with ``apply``, ``begin``, ``end`` and ``reset``."""

    class WeightUpdater:
        def __init__(self, engine):
            self.engine = engine

        def begin_weight_update(self):
            return self.engine.begin()

        def end_weight_update(self, *, run_post_load):
            return self.engine.end(run_post_load)

    for name in _UPDATES:

        def update(self, weights, *, fails=False):
            return self.engine.apply(weights, fails=fails)

        setattr(WeightUpdater, name, update)

    class HiCacheController:
        def __init__(self, engine):
            self.engine = engine

        def reset(self):
            return self.engine.reset()

    return WeightUpdater, HiCacheController


class WeightChecker:
    """SGLang's class that writes random weights, for tests of updates."""

    def _reset_tensors(self, skip_tensor_list=None):
        pass


def make_modules(updater_class, controller_class, import_static_state, checker_class=None):
    """SGLang's modules with these classes and this function, by their names."""
    modules: dict[str, Any] = {name: ModuleType(name) for name in (MANAGERS, COMPONENTS, RUNNER, CHECKER)}
    modules[CHECKER].WeightChecker = checker_class or type("WeightChecker", (WeightChecker,), {})
    modules[MANAGERS].cache_controller = SimpleNamespace(HiCacheController=controller_class)
    manager: Any = ModuleType("weight_updater")
    modules[COMPONENTS].weight_updater = manager
    manager._import_static_state = import_static_state
    modules[RUNNER].WeightUpdater = updater_class
    return modules


def installed(watch, updater_class, controller_class, checker_class=None, *, is_start=True):
    """Install the watch with these classes in place of SGLang's. Returns the manager of weight updates."""
    modules = make_modules(updater_class, controller_class, lambda: "restored", checker_class)
    with mock.patch.dict(sys.modules, modules):
        install(is_start=is_start, watch=watch)
    return modules[COMPONENTS].weight_updater
