# SPDX-License-Identifier: Apache-2.0
"""From a command line and configuration files to `Settings`. The line wins over a file, a file over defaults."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from omni_engine.arguments.config_file import read_config
from omni_engine.arguments.faults import Fault, SettingsError
from omni_engine.arguments.flag import Flag, plain_text
from omni_engine.arguments.settings import CONCERNS, FLAGS, GROUPS, Settings
from omni_engine.arguments.validate import settings_without, validate

_CONFIG = "config"


class _Parser(argparse.ArgumentParser):
    """argparse that reports a malformed command line as the other faults are reported."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError([Fault("command line", message, "See --help")])


def build_parser() -> argparse.ArgumentParser:
    """The argparse parser made from the settings dataclasses: every value is left as text for `Flag.convert`."""
    parser = _Parser(
        prog="pretrain_flowgrpo",
        usage="%(prog)s [--config FILE ...] --model FOLDER --train-prompts FILE [flags]",
        description="Train a diffusion model by reinforcement learning (FlowGRPO) on Megatron-core.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=110),
    )
    parser.add_argument(
        f"--{_CONFIG}",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="YAML files (or the args.json of a run) whose keys are flag names. A later file wins over an earlier one, "
        "and the command line wins over all.",
    )
    for group, flags in GROUPS.items():
        title, _, description = (CONCERNS[group].__doc__ or "").partition(": ")
        section = parser.add_argument_group(title, description)
        for flag in flags:
            section.add_argument(flag.option, **_argparse_options(flag))
    return parser


def _argparse_options(flag: Flag) -> dict[str, Any]:
    # No default and no type here: None means "not on the command line", and conversion is one for all sources.
    help_text = f"{flag.declared.help} [{'; '.join(_notes(flag))}]".replace("%", "%%")
    options: dict[str, Any] = {"default": None, "help": help_text}
    if flag.kind is bool:
        return options | {"action": argparse.BooleanOptionalAction}
    choices = flag.declared.choices
    options["metavar"] = "{" + ",".join(choices) + "}" if choices else flag.kind.__name__.upper()
    return options if flag.count is None else options | {"nargs": flag.count}


def _notes(flag: Flag) -> list[str]:
    notes = ["required" if flag.required else f"default: {plain_text(flag.default)}"]
    if flag.declared.unit is not None:
        notes.append(f"unit: {flag.declared.unit}")
    if flag.bounds:
        notes.append(flag.bounds)
    if flag.declared.source is not None:
        notes.append(f"as in {flag.declared.source}")
    return notes


def parse_settings(argv: Sequence[str] | None = None) -> Settings:
    """Settings of a command line (`sys.argv[1:]` when None). `--help` prints the flags and exits.

    Raises:
        SettingsError: unknown flags or keys, values of the wrong type, missing required flags; all of them.
    """
    values, faults = _collect(argv)
    if faults:
        raise SettingsError(faults)
    return Settings.from_values(values)


def load_settings(argv: Sequence[str] | None = None, world_size: int | None = None) -> Settings:
    """Parsed and validated settings: what an entry point calls before any process group or model exists.

    Args:
        argv: command line, `sys.argv[1:]` when None.
        world_size: processes of the run; the WORLD_SIZE that torchrun sets, or 1, when None.

    Raises:
        SettingsError: every fault of the command line, of the files and of their combination, in one message.
    """
    values, faults = _collect(argv)
    if world_size is None:
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
    spoilt = {name for fault in faults for name in fault.names}
    settings = settings_without(values, spoilt)
    faults += [fault for fault in validate(settings, world_size) if spoilt.isdisjoint(fault.names)]
    if faults:
        raise SettingsError(faults)
    return settings


def settings_from_dict(plain: Mapping[str, Any]) -> Settings:
    """Settings from their plain form (`Settings.to_dict`, `args.json`), checked like a configuration file.

    Raises:
        SettingsError: unknown names, wrong types, missing required names; all of them.
    """
    values, faults = _convert(plain, "")
    faults += _missing(values, faults)
    if faults:
        raise SettingsError(faults)
    return Settings.from_values(values)


def _collect(argv: Sequence[str] | None) -> tuple[dict[str, Any], list[Fault]]:
    """Typed values by flag name from all sources, and every fault met on the way."""
    namespace, extras = build_parser().parse_known_args(sys.argv[1:] if argv is None else list(argv))
    given = vars(namespace)
    values: dict[str, Any] = {}
    faults: list[Fault] = []
    for path in given.pop(_CONFIG):
        plain, file_faults = read_config(path)
        file_values, value_faults = _convert(plain, f"{path}, ")
        values |= file_values
        faults += file_faults + value_faults
    typed, typed_faults = _convert({name: raw for name, raw in given.items() if raw is not None}, "")
    values |= typed
    faults += typed_faults + _unknown_arguments(extras)
    return values, faults + _missing(values, faults)


def _convert(plain: Mapping[str, Any], place: str) -> tuple[dict[str, Any], list[Fault]]:
    values: dict[str, Any] = {}
    faults: list[Fault] = []
    for key, raw in plain.items():
        name = str(key).replace("-", "_")
        flag = FLAGS.get(name)
        if flag is None:
            faults.append(Fault(f"{place}{key}", "no such flag", _nearest(name)))
            continue
        try:
            values[name] = flag.convert(raw)
            problem = flag.check(values[name])
        except ValueError as error:
            problem = str(error)
        if problem is not None:
            values.pop(name, None)
            shown = plain_text(tuple(raw)) if isinstance(raw, list) else plain_text(raw)
            faults.append(Fault(f"{place}{flag.option} {shown}", problem, flag.expected, (name,)))
    return values, faults


def _missing(values: Mapping[str, Any], faults: Sequence[Fault]) -> list[Fault]:
    spoilt = {name for fault in faults for name in fault.names}
    return [
        Fault(
            flag.option,
            "must be given",
            f"Add {flag.option} {flag.type_name.upper()}: {flag.declared.help}".rstrip("."),
            (name,),
        )
        for name, flag in FLAGS.items()
        if flag.required and name not in values and name not in spoilt
    ]


def _unknown_arguments(extras: Sequence[str]) -> list[Fault]:
    faults = []
    after_unknown = False
    for argument in extras:
        if argument.startswith("--") and len(argument) > 2:
            option = argument.partition("=")[0]
            faults.append(Fault(option, "no such flag", _nearest(option.lstrip("-").replace("-", "_"))))
            after_unknown = True
        elif not after_unknown:  # the value of an unknown flag is no fault of its own
            faults.append(
                Fault(repr(argument), "stands alone on the command line", "Put the flag it belongs to before it")
            )
    return faults


def _nearest(name: str) -> str:
    names = [*FLAGS, _CONFIG, *(f"no_{flag.name}" for flag in FLAGS.values() if flag.kind is bool)]
    matches = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"Did you mean --{matches[0].replace('_', '-')}?" if matches else "See --help for the flags"
