# SPDX-License-Identifier: Apache-2.0
"""However megatron.core comes to be imported, the platform has prepared it, once; if it came first, that is an error.

Does not cover: what a platform prepares. MindSpeed and torch_npu are stand-ins that record in which order they run.
"""

from __future__ import annotations

import importlib
import inspect
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
import torch

from omni_engine.platform import get_platform, megatron_hook
from tests.platform.conftest import RunPython


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.fast
def test_importing_the_package_imports_neither_torch_nor_megatron(run_python: RunPython) -> None:
    result = run_python(
        """
        import importlib.util, sys
        import omni_engine
        importlib.util.find_spec("megatron.core") if "megatron" in sys.modules else importlib.util.find_spec("megatron")
        assert not {"torch", "numpy", "megatron.core"} & set(sys.modules)
        omni_engine.megatron_hook.register()
        hooks = [f for f in sys.meta_path if isinstance(f, omni_engine.megatron_hook.MegatronFinder)]
        assert len(hooks) == 1
        """
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.fast
def test_looking_for_megatron_does_not_select_a_platform(run_python: RunPython, tmp_path: Path) -> None:
    stubs = _write(tmp_path / "stubs", {"megatron/core/__init__.py": "", "torch.py": "raise SystemExit('imported')"})
    result = run_python(
        """
        import importlib.util
        import omni_engine
        spec = importlib.util.find_spec("megatron.core")
        assert spec.origin.endswith("core/__init__.py") and spec.loader.get_filename() == spec.origin
        """,
        first_on_path=stubs,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.fast
def test_names_that_only_begin_alike_are_left_alone() -> None:
    finder = megatron_hook.MegatronFinder(prepared=True)
    assert finder.find_spec("megatron.core_tools", None) is None
    assert finder.find_spec("megatron.training", None) is None
    assert finder.find_spec("megatron", None) is None


def test_megatron_first_is_refused_with_the_remedy(run_python: RunPython, tmp_path: Path) -> None:
    stubs = _write(tmp_path / "stubs", {"megatron/core/__init__.py": ""})
    result = run_python("import megatron.core\nimport omni_engine", first_on_path=stubs)
    assert result.returncode != 0
    assert "PlatformError: megatron.core was imported before omni_engine" in result.stderr
    assert "move `import omni_engine` above" in result.stderr


@pytest.mark.fast
@pytest.mark.skipif(get_platform().name != "cpu", reason="only the CPU platform replaces torch")
def test_modules_keep_their_own_loader_and_stay_patched_when_reloaded() -> None:
    from megatron.core import jit

    for _ in range(2):
        assert type(jit.__loader__) is SourceFileLoader
        assert jit.__spec__.loader is jit.__loader__
        assert "def noop_decorator" in inspect.getsource(jit)
        assert jit.torch is not torch and jit.jit_fuser is jit.noop_decorator
        importlib.reload(jit)


def test_a_spawned_process_is_prepared_too(run_python: RunPython, tmp_path: Path) -> None:
    """Megatron's checkpoint writer starts a process by "spawn", which unpickles what it is given by importing it."""
    megatron = {
        "megatron/core/__init__.py": "",
        "megatron/core/a.py": "import torch\nclass Shard:\n    key = 'weight'\n",
    }
    result = run_python(
        """
        import multiprocessing
        import omni_engine
        from megatron.core.a import Shard

        def child(shard, queue):
            import megatron.core.a, torch
            queue.put((shard.key, megatron.core.a.torch is torch))

        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            queue = context.Queue()
            process = context.Process(target=child, args=(Shard(), queue))
            process.start()
            assert queue.get(timeout=60) == ("weight", False)
            process.join()
        """,
        first_on_path=_write(tmp_path / "stubs", megatron),
    )
    assert result.returncode == 0, result.stderr


# Stand-ins; torch is one only because importing the real one takes seconds.
_NPU = {
    "torch.py": "",
    "torch_npu/__init__.py": "import torch, types\n"
    "log = []\n"
    "torch.npu = types.SimpleNamespace(is_available=lambda: True)",
    "torch_npu/contrib/__init__.py": "",
    "torch_npu/contrib/transfer_to_npu.py": "import torch_npu\ntorch_npu.log.append('transfer')",
    "megatron/core/__init__.py": "import torch_npu\ntorch_npu.log.append('core')",
    "megatron/core/a.py": "x = 1",
}
# MindSpeed imports the modules that it patches.
_MINDSPEED = {
    "mindspeed/__init__.py": "",
    "mindspeed/megatron_adaptor.py": "import torch_npu\n"
    "torch_npu.log.append('adaptor')\n"
    "import megatron.core.a\n"
    "megatron.core.a.x = 2",
}


@pytest.mark.fast
def test_on_npu_the_adaptor_comes_first_and_megatron_is_loaded_once(run_python: RunPython, tmp_path: Path) -> None:
    result = run_python(
        """
        import sys
        import omni_engine
        from megatron.core import a
        import megatron.core, torch_npu
        assert torch_npu.log == ["transfer", "adaptor", "core"], torch_npu.log
        assert megatron.core is sys.modules["megatron.core"] and megatron.core.a is a and a.x == 2
        assert omni_engine.platform.get_platform().name == "npu"
        """,
        first_on_path=_write(tmp_path / "stubs", {**_NPU, **_MINDSPEED}),
        OMNI_PLATFORM="auto",
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.fast
def test_on_npu_a_missing_adaptor_is_an_error_each_time_and_none_once_it_is_there(
    run_python: RunPython, tmp_path: Path
) -> None:
    later = _write(tmp_path / "later", _MINDSPEED)
    result = run_python(
        f"""
        import sys
        import omni_engine
        from omni_engine.platform import PlatformError
        for _ in range(2):
            try:
                import megatron.core
            except PlatformError as error:
                assert "MindSpeed" in str(error) and "core_r0.16.0" in str(error)
            else:
                raise SystemExit("no error")
        sys.path.append({str(later)!r})
        import megatron.core.a
        assert megatron.core.a.x == 2
        """,
        first_on_path=_write(tmp_path / "stubs", _NPU),
        OMNI_PLATFORM="npu",
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.fast
@pytest.mark.parametrize("first", ["mindspeed.megatron_adaptor", "megatron.core"])
def test_on_npu_megatron_first_is_fine_only_after_the_adaptor(
    run_python: RunPython, tmp_path: Path, first: str
) -> None:
    stubs = _write(tmp_path / "stubs", {**_NPU, **_MINDSPEED})
    result = run_python(f"import {first}\nimport omni_engine", first_on_path=stubs, OMNI_PLATFORM="npu")
    assert (result.returncode == 0) == (first != "megatron.core"), result.stderr
    assert ("without MindSpeed's patches" in result.stderr) == (first == "megatron.core")
