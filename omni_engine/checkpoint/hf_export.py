# SPDX-License-Identifier: Apache-2.0
"""Export of a trained policy: a pipeline folder that `DiffusionPipeline.from_pretrained` loads, or adapters alone.

Of a pipeline folder the transformer's weights are new; all other components are copied from the folder that the run
started from.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from omni_engine.checkpoint.errors import CheckpointError
from omni_engine.checkpoint.gather import whole_tensors
from omni_engine.checkpoint.huggingface import INDEX_FILE, SINGLE_FILE
from omni_engine.checkpoint.lora_files import ADAPTER_FILE, merged, write_adapter_file
from omni_engine.models.mapping import ModelMapping, is_adapter
from omni_engine.models.policy import Policy
from omni_engine.parallel import ParallelGroups

SHARD_BYTES = 10 * 2**30
TRANSFORMER = "transformer"
PIPELINE_FILE = "model_index.json"


def export_policy(policy: Policy, source: Path, target: Path, merge: bool = False) -> None:
    """Write the trained policy: a pipeline folder, or its adapters alone where it has some and `merge` is not set.

    A collective of one model replica's ranks, that of global rank 0, which writes.

    Raises:
        CheckpointError: on rank 0, the folder cannot be written; the others have done their part all the same.
    """
    if policy.lora is not None and not merge:
        tensors = whole_tensors(policy.adapters(), policy.mapping, policy.groups)
        rank, alpha = policy.lora.lora_rank, policy.lora.alpha
        _write_on_first_rank(tensors, lambda: write_adapters(tensors, rank, alpha, source, target), policy.groups)
    else:
        scale = 0.0 if policy.lora is None else policy.lora.scale
        export_pipeline(policy.parameters(), policy.mapping, source, target, policy.groups, scale)


def export_pipeline(
    parameters: Mapping[str, torch.nn.Parameter],
    mapping: ModelMapping,
    source: Path,
    target: Path,
    groups: ParallelGroups,
    scale: float = 0.0,
) -> None:
    """Write the trained policy as a pipeline folder, in the parameters' dtype; adapters are added to their weights.

    A collective of one model replica's ranks, that of global rank 0, which writes. Tensors are gathered one by one; the
    writer's host holds up to SHARD_BYTES of them, and the adapters.

    Args:
        scale: what the product of an adapter's matrices is multiplied by.

    Raises:
        CheckpointError: on rank 0, the folder cannot be written; the others have done their part all the same.
    """
    adapters = {path: parameter for path, parameter in parameters.items() if is_adapter(path)}
    base = {path: parameter for path, parameter in parameters.items() if not is_adapter(path)}
    tensors = whole_tensors(base, mapping, groups)
    if adapters:
        tensors = merged(tensors, dict(whole_tensors(adapters, mapping, groups)), scale)
    _write_on_first_rank(tensors, lambda: write_pipeline(tensors, source, target), groups)


def _write_on_first_rank(
    tensors: Iterator[tuple[str, torch.Tensor]], write: Callable[[], None], groups: ParallelGroups
) -> None:
    try:
        if groups.rank == 0:
            write()
    finally:
        # The gathers go on to the end even if nothing is written any more: peers are in them.
        for _ in tensors:
            pass


def check_export_target(source: Path, target: Path, adapters: bool = False) -> None:
    """Refuse a target that must not be replaced.

    Args:
        adapters: whether adapters alone are written, which may replace their like and no whole pipeline.

    Raises:
        CheckpointError: it is, holds or lies in the source folder, or is a folder of something else.
    """
    kind, file = ("folder of adapters", ADAPTER_FILE) if adapters else ("exported pipeline", PIPELINE_FILE)
    inner, outer = source.resolve(), target.resolve()
    if inner == outer or outer in inner.parents or inner in outer.parents:
        raise CheckpointError(f"the export to {target} would overwrite {source}, which it copies from; choose another")
    if target.exists() and not (target / file).exists() and (target.is_file() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is no {kind}; choose another folder for the export")


def write_pipeline(tensors: Iterator[tuple[str, torch.Tensor]], source: Path, target: Path) -> None:
    """Write a pipeline folder from the transformer's tensors and another pipeline's other components.

    Raises:
        CheckpointError: the folder cannot be written, or must not be.
    """
    check_export_target(source, target)
    with _replacing(target) as partial:
        # The model card tells of the other model.
        shutil.copytree(source, partial, ignore=lambda folder, names: _left_out(Path(folder), names, source))
        _write_shards(tensors, partial / TRANSFORMER)


def write_adapters(
    tensors: Iterator[tuple[str, torch.Tensor]], rank: int, alpha: float, source: Path, target: Path
) -> None:
    """Write a folder with the one file that `QwenImagePipeline.load_lora_weights` reads.

    Raises:
        CheckpointError: the folder cannot be written, or must not be.
    """
    check_export_target(source, target, adapters=True)
    with _replacing(target) as partial:
        partial.mkdir()
        write_adapter_file(tensors, rank, alpha, partial / ADAPTER_FILE)


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A folder beside `target` to write into, which takes its place when the block is done.

    Raises:
        CheckpointError: something could not be written; what lay there is as it was.
    """
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the export cannot be written to {target} ({error}); free space there or choose another folder"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _left_out(folder: Path, names: list[str], source: Path) -> list[str]:
    if folder == source:
        return [name for name in names if name in ("README.md", ".git", ".gitattributes", ".cache")]
    if folder == source / TRANSFORMER:
        return [name for name in names if ".safetensors" in name or ".bin" in name]
    return []


def _write_shards(tensors: Iterator[tuple[str, torch.Tensor]], folder: Path) -> None:
    """Stream tensors into safetensors files of bounded size, and the index where there are several."""
    shards: list[dict[str, int]] = []
    pending: dict[str, torch.Tensor] = {}

    def flush() -> None:
        save_file(pending, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append({name: tensor.nbytes for name, tensor in pending.items()})
        pending.clear()

    for name, tensor in tensors:
        if pending and sum(held.nbytes for held in pending.values()) + tensor.nbytes > SHARD_BYTES:
            flush()
        pending[name] = tensor
    flush()
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / SINGLE_FILE)
        return
    weight_map = {}
    for number, sizes in enumerate(shards):
        file = f"diffusion_pytorch_model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{number}").rename(folder / file)
        weight_map.update(dict.fromkeys(sizes, file))
    index = {"metadata": {"total_size": sum(sum(sizes.values()) for sizes in shards)}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2), encoding="utf-8")
