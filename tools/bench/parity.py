# SPDX-License-Identifier: Apache-2.0
"""Puts together what the ranks of a layout ended with, and measures how far it is from what one process ended with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

WORKER = "tools.bench.parity_worker"


@dataclass(frozen=True)
class Rank:
    """A rank's place in the layout (tp, cp, pp, dp), the metrics that it was told, and its tensors."""

    place: dict[str, int]
    figures: dict[str, float]
    tensors: dict[str, torch.Tensor]


def plan_arguments(plan: Mapping[str, Sequence[str]]) -> list[str]:
    """The worker's arguments for these cases of these layouts."""
    return [f"{layout}={','.join(cases)}" for layout, cases in plan.items()]


def read_ranks(folder: Path, case: str) -> list[Rank]:
    """What the ranks have left in FOLDER/CASE.RANK.safetensors."""
    ranks = []
    for file in sorted(folder.glob(f"{case}.?.safetensors")):
        with safe_open(file, "pt") as handle:
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 - not a dict
            about = {name: json.loads(text) for name, text in handle.metadata().items()}
        ranks.append(Rank(about["place"], about["figures"], tensors))
    return ranks


def whole(ranks: Sequence[Rank], kind: str) -> dict[str, torch.Tensor]:
    """Tensors by Hugging Face name from the shards.

    Raises:
        ValueError: what several ranks hold alike is not alike bit for bit.
    """
    held: dict[str, dict[tuple[int, int, int], torch.Tensor]] = {}
    for rank in ranks:
        place = (rank.place["tp"], rank.place["dp"], rank.place["cp"])
        for key, value in rank.tensors.items():
            if key.startswith(f"{kind}/"):
                held.setdefault(key.removeprefix(f"{kind}/"), {})[place] = value
    out = {}
    for key, shards in held.items():
        dim, name = key.split("/")
        of_a_replica = [shard for (_, dp, cp), shard in sorted(shards.items()) if dp == cp == 0]
        for (tp, dp, cp), shard in shards.items():
            if not torch.equal(shard, of_a_replica[0 if dim == "None" else tp]):
                raise ValueError(f"{kind} of {name} differs on tp {tp}, dp {dp}, cp {cp}")
        out[name] = of_a_replica[0] if dim == "None" else torch.cat(of_a_replica, int(dim))
    return out


def decisions(ranks: Sequence[Rank]) -> torch.Tensor:
    """float64 [decisions of all replicas, 4]: update, sample, log-prob, share of the loss; by update and sample.

    Raises:
        ValueError: the ranks of a replica's last stage do not agree.
    """
    of_replica: dict[int, torch.Tensor] = {}
    for rank in ranks:
        if "decisions" in rank.tensors:
            rows = rank.tensors["decisions"]
            if not torch.equal(of_replica.setdefault(rank.place["dp"], rows), rows):
                raise ValueError(f"decisions differ on tp {rank.place['tp']}, cp {rank.place['cp']}")
    rows = torch.cat([of_replica[dp] for dp in sorted(of_replica)])
    rows = rows[rows[:, 1].argsort(stable=True)]
    return rows[rows[:, 0].argsort(stable=True)]


def errors(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """|ours - theirs| / |theirs| of every tensor, Euclidean; one that is all zero in both has none.

    Raises:
        ValueError: they are not the same tensors.
    """
    if set(ours) != set(theirs):
        raise ValueError(f"only one side has {', '.join(sorted(set(ours) ^ set(theirs)))}")
    out = {}
    for name, expected in theirs.items():
        difference = float((ours[name] - expected).norm())
        out[name] = difference / float(expected.norm()) if difference else 0.0
    return out


def worst(found: Mapping[str, float]) -> tuple[float, str]:
    """The largest error and its name."""
    return max((error, name) for name, error in found.items())


def moved(ranks: Sequence[Rank]) -> dict[str, torch.Tensor]:
    """What the optimizer steps have added to every weight."""
    before, after = whole(ranks, "before"), whole(ranks, "after")
    return {name: after[name] - before[name] for name in before}


@dataclass(frozen=True)
class Deviation:
    """How far a layout is from one process, each the worst found.

    Attributes:
        loss: of an update, relative to the sum of the sizes of its decisions' shares: the shares have both signs and
            nearly cancel, so the loss itself is no measure.
        loss_absolute: the same, as a number; an advantage is of size 1.
        log_prob: of a decision, over all updates, relative to its size.
        grad: of a parameter in the first update, relative to its norm.
        grad_norm: relative.
        optimizer: of a weight after all steps, relative to its norm.
        displacement: of what the steps added to a weight, relative to its norm; it carries the weight's rounding.
        grad_of, optimizer_of: which parameter it was.
    """

    loss: float
    loss_absolute: float
    log_prob: float
    grad: float
    grad_norm: float
    optimizer: float
    displacement: float
    grad_of: str
    optimizer_of: str


def compare(ranks: Sequence[Rank], alone: Sequence[Rank]) -> Deviation:
    """A layout's ranks against the one process, in the same case.

    Raises:
        ValueError: ranks of the layout that must agree do not, or the parameters or decisions are not the same ones.
    """
    for rank in ranks[1:]:
        if rank.figures != ranks[0].figures:
            raise ValueError(f"metrics differ on {rank.place}")
    if worst(errors(whole(ranks, "before"), whole(alone, "before")))[0]:
        raise ValueError("the weights differ before the first step")
    ours, theirs = decisions(ranks), decisions(alone)
    if not torch.equal(ours[:, :2], theirs[:, :2]):
        raise ValueError("the updates have not seen the same samples")
    loss, size = 0.0, 0.0
    losses = []
    for update in theirs[:, 0].unique():
        rows = theirs[:, 0] == update
        loss = abs(float(ours[rows, 3].sum() - theirs[rows, 3].sum()))
        size = float(theirs[rows, 3].abs().sum())
        losses.append((loss / size, loss))
    grad, grad_of = worst(errors(whole(ranks, "gradient"), whole(alone, "gradient")))
    optimizer, optimizer_of = worst(errors(whole(ranks, "after"), whole(alone, "after")))
    norms = [name for name in alone[0].figures if name.endswith("grad_norm")]
    return Deviation(
        loss=max(losses)[0],
        loss_absolute=max(absolute for _, absolute in losses),
        log_prob=float(((ours[:, 2] - theirs[:, 2]) / theirs[:, 2]).abs().max()),
        grad=grad,
        grad_norm=max(abs(ranks[0].figures[name] / alone[0].figures[name] - 1.0) for name in norms),
        optimizer=optimizer,
        displacement=worst(errors(moved(ranks), moved(alone)))[0],
        grad_of=grad_of,
        optimizer_of=optimizer_of,
    )
