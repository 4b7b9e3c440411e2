# SPDX-License-Identifier: Apache-2.0
"""The import hook through which the platform meets Megatron-core. It acts on `megatron.core` and its submodules only.

Why: Megatron-core writes "cuda" throughout, so on another device its modules have to be met as they are imported. A
hook does it whoever imports them, in any order, and also in the processes that Megatron starts by multiprocessing
"spawn" (those import the main module, hence omni_engine, again).
When: the platform is selected and prepares right before `megatron.core` itself is made, not when someone only asks
whether it is installed (`importlib.util.find_spec`). Each module is handed to the platform right after it ran.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from omni_engine import platform as platforms

ROOT = "megatron.core"


def register() -> None:
    """Put the hook in place; a second call does nothing. Imports torch only if Megatron-core is loaded already.

    Raises:
        PlatformError: `megatron.core` was imported before, and the platform cannot mend that.
    """
    if any(isinstance(finder, MegatronFinder) for finder in sys.meta_path):
        return
    loaded = [module for name, module in list(sys.modules.items()) if _in_scope(name)]
    if loaded:
        platforms.get_platform().adopt_loaded_megatron(loaded)
    sys.meta_path.insert(0, MegatronFinder(prepared=bool(loaded)))


def _in_scope(name: str) -> bool:
    return name == ROOT or name.startswith(ROOT + ".")


class MegatronFinder(MetaPathFinder):
    """Finds `megatron.core` modules as the finders behind it do, and wraps their loader."""

    def __init__(self, prepared: bool) -> None:
        self._prepared = prepared

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not _in_scope(fullname):
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader, self)
        return spec

    def prepare_once(self) -> bool:
        """Let the platform prepare, unless it has; say whether it did so now. An error leaves it to the next import."""
        if self._prepared:
            return False
        self._prepared = True  # set first: preparing may import megatron.core itself
        try:
            platforms.get_platform().prepare_megatron()
        except BaseException:
            self._prepared = False
            raise
        return True


class _PatchingLoader(Loader):
    """Runs a module by its own loader, then lets the platform patch it. Leaves no trace of itself on the module."""

    def __init__(self, inner: Loader, finder: MegatronFinder) -> None:
        self._inner = inner
        self._finder = finder
        self._already_run = False

    def __getattr__(self, name: str) -> object:
        # Whoever only looks for the module (runpy, pkgutil, inspect) may ask for its code, source or path.
        return getattr(self._inner, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        if self._finder.prepare_once() and spec.name in sys.modules:
            # Preparing imported this very module (MindSpeed does): there must not be a second one.
            self._already_run = True
            return sys.modules[spec.name]
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        if not self._already_run:
            self._inner.exec_module(module)
            platforms.get_platform().patch_megatron_module(module)
