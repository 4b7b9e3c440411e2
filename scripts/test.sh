#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything a change must pass: style, types, the flag reference, the fast tests, then the others.
#
#   scripts/test.sh           all of it
#   scripts/test.sh --fast    stop after the fast tests
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
ONLY_FAST=0
for argument in "$@"; do
    case "$argument" in
        --fast) ONLY_FAST=1 ;;
        -h | --help) sed -n '3,6s/^# \{0,1\}//p' scripts/test.sh; exit 0 ;;
        *) echo "test: no such option: $argument (there is --fast)" >&2; exit 1 ;;
    esac
done

scripts/setup.sh --dev
PYTHON="${OMNI_PYTHON:-$PWD/.venv/bin/python}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
# One thread a process: tests start several processes, and threads that wait for a busy core cost more than they give.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"

step() {
    echo "--- $*"
    "$@"
}
step "$PYTHON" -m ruff check .
step "$PYTHON" -m ruff format --check .
step "$PYTHON" -m mypy omni_engine
step "$PYTHON" -m omni_engine.arguments.reference --check docs/flags.md
# Two processes: the fast tests compute on one core each. The others start processes of their own.
step "$PYTHON" -m pytest -m fast -n 2
if [[ $ONLY_FAST == 1 ]]; then exit 0; fi
step "$PYTHON" -m pytest -m "not fast"
