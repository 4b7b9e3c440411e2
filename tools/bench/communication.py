# SPDX-License-Identifier: Apache-2.0
"""What a rank of Qwen-Image (20.4 B, 60 blocks) exchanges in an optimizer update, by axis, from the formula.

    python -m tools.bench.communication [--json] [--layout TP4-SP ...] [--explain] [--guidance joined] [--batch 1]

Nothing is run and no device is asked: the bytes follow from the layout (omni_engine/models/communication.py), which the
tests hold against real runs of small models. An update is `--micro-batches` forward and backward passes, the reduction
of the gradients and a step, in bf16 with float32 gradients. Shown is the pipeline rank that sends most. "sent" are the
bytes that leave a rank with ring algorithms; divided by a link's speed they give the time of the wires alone.

A layout is written TPnxUnxRnxPPnxVPPnxDPn (what is not named is 1) and -SP (sequence parallelism), -DO (distributed
optimizer): TP4xDP2-SP-DO.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import omni_engine  # noqa: F401 - prepares megatron.core's import
from omni_engine.arguments import ParallelSettings
from omni_engine.models.communication import Axis, Communication, Exchange, Work
from omni_engine.models.costs import Layout
from omni_engine.models.qwen_image import QwenImageConfig
from omni_engine.models.qwen_image_costs import qwen_image_spec
from omni_engine.models.qwen_image_layers import qwen_image_network
from omni_engine.models.stages import cut_stages

QWEN_IMAGE = QwenImageConfig(
    in_channels=64,
    out_channels=16,
    num_layers=60,
    attention_head_dim=128,
    num_attention_heads=24,
    joint_attention_dim=3584,
    axes_dims_rope=(16, 56, 56),
)
BF16 = 2
LAYOUTS = (
    *("TP2", "TP2-SP", "TP4", "TP4-SP", "TP8-SP", "U2", "U4", "R2", "R4", "U2xR2", "PP4", "PP4xVPP3", "DP4", "DP4-DO"),
    *("TP2xU2-SP", "TP2xPP2-SP", "TP4xDP2-SP-DO", "TP2xU2xDP2-SP-DO", "TP2xU2xPP2-SP"),
)
SIZES = {
    "TP": "tensor_model_parallel_size",
    "U": "ulysses_degree",
    "R": "ring_degree",
    "PP": "pipeline_model_parallel_size",
    "VPP": "num_virtual_stages_per_pipeline_rank",
}
OPTIONS = {"SP": "sequence_parallel", "DO": "use_distributed_optimizer"}


def parse(name: str) -> Layout:
    """A layout by name.

    Raises:
        ValueError: the name is no layout.
    """
    sizes, *options = name.split("-")
    values: dict[str, Any] = {}
    replicas = 1
    for part in sizes.split("x"):
        match = re.fullmatch(r"([A-Z]+)([1-9]\d*)", part)
        if match is None or match[1] not in (*SIZES, "DP"):
            raise ValueError(f"layout {name}: '{part}' is none of {', '.join((*SIZES, 'DP'))} with a number")
        if match[1] == "DP":
            replicas = int(match[2])
        else:
            values[SIZES[match[1]]] = int(match[2])
    for option in options:
        if option not in OPTIONS:
            raise ValueError(f"layout {name}: '{option}' is none of {', '.join(OPTIONS)}")
        values[OPTIONS[option]] = True
    return Layout(ParallelSettings(**values), replicas)


@dataclass(frozen=True)
class Update:
    """An optimizer update. guidance: none; joined: both branches in one pass; apart: the unconditional one without a
    graph."""

    work: Work
    guidance: str
    recompute: str

    def of(self, rank: Communication) -> list[Exchange]:
        """All that a rank exchanges in it."""
        work = self.work
        if self.guidance == "joined":
            work = replace(work, batch=2 * work.batch)
        apart = rank.evaluate(work) if self.guidance == "apart" else []
        return [*apart, *rank.train(work, self.recompute), *rank.check(), *rank.update()]


def ranks_of(name: str, work: Work) -> list[Communication]:
    """One rank of every pipeline stage."""
    layout = parse(name)
    spec = qwen_image_spec(QWEN_IMAGE, work.tokens["image"], work.tokens["text"])
    cut = cut_stages(spec.blocks, layout.pp * layout.vpp, first=spec.embedding, last=spec.head)
    network = qwen_image_network(QWEN_IMAGE)
    return [Communication(network, layout, cut, rank, BF16) for rank in range(layout.pp)]


def rows(name: str, update: Update) -> Iterator[dict[str, Any]]:
    """A row an axis, of the rank that sends most."""
    every = [(rank, update.of(rank)) for rank in ranks_of(name, update.work)]
    busiest, exchanges = max(every, key=lambda pair: sum(one.sent(pair[0].ranks(one.axis)) for one in pair[1]))
    by_axis: dict[Axis, list[Exchange]] = defaultdict(list)
    for one in exchanges:
        by_axis[one.axis].append(one)
    for axis, found in by_axis.items():
        yield {
            "layout": name,
            "devices": busiest.ranks("world"),
            "pipeline_rank": busiest.pp_rank,
            "axis": axis,
            "calls": sum(one.count for one in found),
            "payload_bytes": sum(one.bytes for one in found),
            "sent_bytes": round(sum(one.sent(busiest.ranks(axis)) for one in found)),
            "exchanges": [
                {"kind": one.kind, "calls": one.count, "payload_bytes": one.payload, "reason": one.reason}
                for one in found
            ],
        }


SHOWN = ("tp", "ulysses", "ring", "pp", "dp_cp")
"""Axes with a column of their own; what crosses the others is small."""


def show(name: str, found: list[dict[str, Any]], explain: bool) -> None:
    sent = {row["axis"]: row["sent_bytes"] / 1e9 for row in found}
    columns = [sent.get(axis, 0.0) for axis in SHOWN]
    others = sum(sent.values()) - sum(columns)
    calls = sum(row["calls"] for row in found)
    cells = "".join(f"{value:10.3f}" for value in (*columns, others, sum(sent.values())))
    print(f"{name:18s}{found[0]['devices']:8d}{cells}{calls:9d}")
    for row in found if explain else ():
        for one in row["exchanges"]:
            size = f"{one['calls']:6d} x {one['payload_bytes']:14,d} bytes"
            print(f"    {row['axis']:8s}{size}  {one['kind']:14s} {one['reason']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object a row")
    parser.add_argument("--explain", action="store_true", help="every exchange with its reason")
    parser.add_argument("--layout", nargs="+", default=LAYOUTS, help="layouts by name")
    parser.add_argument("--micro-batches", type=int, default=8, help="of an update")
    parser.add_argument("--batch", type=int, default=1, help="samples of a micro-batch")
    parser.add_argument("--image-tokens", type=int, default=4096, help="of a sample; 4096 are 1024 x 1024 pixels")
    parser.add_argument("--text-tokens", type=int, default=128, help="of a sample, padding included")
    parser.add_argument("--guidance", choices=("none", "joined", "apart"), default="none")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    arguments = parser.parse_args()
    tokens = {"image": arguments.image_tokens, "text": arguments.text_tokens}
    work = Work(arguments.micro_batches, arguments.batch, tokens)
    update = Update(work, arguments.guidance, arguments.recompute)
    if not arguments.json:
        print("GB that a rank sends in an update, by axis")
        print(
            f"{'layout':18s}{'devices':>8s}"
            + "".join(f"{axis:>10s}" for axis in (*SHOWN, "others", "all"))
            + "    calls"
        )
    for name in arguments.layout:
        found = list(rows(name, update))
        if arguments.json:
            print("\n".join(json.dumps(row) for row in found))
        else:
            show(name, found, arguments.explain)


if __name__ == "__main__":
    main()
