#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes .venv with everything omni_engine needs. Run it again at any time: when nothing has changed it does nothing.
#
#   scripts/setup.sh          what training needs
#   scripts/setup.sh --dev    also what scripts/test.sh needs
#
#   OMNI_REQUIREMENTS=cpu|cuda|npu   requirement file to install; by default by the accelerator that is present
#   OMNI_PYTHON=/path/to/python      use this interpreter as it is: nothing is installed, its packages are only checked
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
STAMP="$VENV/.omni-setup"           # present only when the install of that content is complete
DEV_STAMP="$VENV/.omni-setup-dev"
INSTALLING="$VENV/.omni-installing" # present while an install runs, and after one that was interrupted

MODULES=(torch megatron.core diffusers transformers accelerate safetensors numpy PIL psutil yaml tqdm onnxruntime
    rapidfuzz tensorboard matplotlib einops)
DEV_MODULES=(pytest pytest_timeout xdist ruff mypy)

say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit 1; }

WITH_DEV=0
for argument in "$@"; do
    case "$argument" in
        --dev) WITH_DEV=1; MODULES+=("${DEV_MODULES[@]}") ;;
        -h | --help) sed -n '3,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) fail "no such option: $argument (there is --dev)" ;;
    esac
done

# Imports MODULES with interpreter $1; prints those that fail, with the reason, and fails then.
check_imports() {
    "$1" -W ignore - "${MODULES[@]}" <<'PYTHON'
import importlib
import sys

missing = []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        missing.append(f"  {name}: {error}")
if sys.version_info < (3, 10):
    missing.append(f"  Python 3.10 or later (this is {sys.version.split()[0]})")
print("\n".join(missing))
sys.exit(bool(missing))
PYTHON
}

choose_requirements() {
    if [[ -n "${OMNI_REQUIREMENTS:-}" ]]; then
        echo "$OMNI_REQUIREMENTS"
    elif command -v nvidia-smi > /dev/null && nvidia-smi -L > /dev/null 2>&1; then
        echo cuda
    elif command -v npu-smi > /dev/null && npu-smi info > /dev/null 2>&1; then
        echo npu
    else
        echo cpu
    fi
}

KIND="$(choose_requirements)"
REQUIREMENTS="$ROOT/requirements/$KIND.txt"
[[ "$KIND" =~ ^(cpu|cuda|npu)$ ]] || fail "OMNI_REQUIREMENTS=$KIND: choose cpu, cuda or npu"

if [[ -n "${OMNI_PYTHON:-}" ]]; then
    command -v "$OMNI_PYTHON" > /dev/null || fail "OMNI_PYTHON=$OMNI_PYTHON: no such program"
    if ! missing="$(check_imports "$OMNI_PYTHON")"; then
        fail "OMNI_PYTHON=$OMNI_PYTHON lacks:
$missing
Install them there, for example: $OMNI_PYTHON -m pip install -r requirements/$KIND.txt$(
            [[ $WITH_DEV == 0 ]] || echo " -r requirements/dev.txt")"
    fi
    say "$OMNI_PYTHON has what is needed"
    exit 0
fi

# Of what is installed (the files given), by which interpreter and where: a .venv copied elsewhere does not work.
fingerprint() {
    { cat "$@" "$ROOT/requirements/base.txt" "$ROOT/setup.py" && "$VENV/bin/python" -VV && echo "$ROOT"; } |
        sha256sum | cut -d ' ' -f 1
}
is_complete() {
    [[ -x "$VENV/bin/python" && -f "$STAMP" && "$(< "$STAMP")" == "$(fingerprint "$REQUIREMENTS")" ]] || return 1
    [[ $WITH_DEV == 0 ]] ||
        [[ -f "$DEV_STAMP" && "$(< "$DEV_STAMP")" == "$(fingerprint "$REQUIREMENTS" "$ROOT/requirements/dev.txt")" ]]
}

if is_complete; then
    say ".venv is up to date"
    exit 0
fi

# The interpreter that .venv is made with: python3, or the newest one beside it when python3 is too old.
PYTHON=""
for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
    if command -v "$candidate" > /dev/null &&
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2> /dev/null; then
        PYTHON="$candidate"
        break
    fi
done
[[ -n "$PYTHON" ]] || fail "Python 3.10 or later is needed; python3 here is $(python3 --version 2>&1 || echo missing).
Install a newer Python, or name one with OMNI_PYTHON=/path/to/python."
"$PYTHON" -c 'import venv, ensurepip' 2> /dev/null || fail "$PYTHON has no module venv or ensurepip.
Install it (Debian and Ubuntu: apt-get install python3-venv), or name an interpreter with OMNI_PYTHON=/path/to/python."

# Two set-ups at once would spoil each other's .venv: the second waits here and then finds the work done.
if command -v flock > /dev/null; then
    exec 9> "$ROOT/.venv.lock"
    flock 9
    if is_complete; then
        say ".venv is up to date"
        exit 0
    fi
fi

if [[ -e "$INSTALLING" ]] || ! "$VENV/bin/python" -m pip --version > /dev/null 2>&1; then
    # pip takes a package that it was stopped in the middle of for installed, so nothing of such a .venv is kept.
    [[ ! -e "$VENV" ]] || say ".venv is incomplete (an earlier set-up was interrupted): making it anew"
    "$PYTHON" -m venv --clear "$VENV"
fi
touch "$INSTALLING"
rm -f "$STAMP" "$DEV_STAMP"

install() { "$VENV/bin/python" -m pip install --disable-pip-version-check -qq "$@"; }
say "installing requirements/$KIND.txt into .venv with $("$VENV/bin/python" --version) (some minutes the first time)"
PACKAGES=(-r "$REQUIREMENTS")
if [[ $WITH_DEV == 1 ]]; then PACKAGES+=(-r "$ROOT/requirements/dev.txt"); fi
install "${PACKAGES[@]}"
install --no-deps --no-build-isolation -e "$ROOT"
missing="$(check_imports "$VENV/bin/python")" || fail "these packages are installed in .venv but do not work:
$missing
Delete .venv and run scripts/setup.sh again; should that not help, see the messages above."

fingerprint "$REQUIREMENTS" > "$STAMP"
if [[ $WITH_DEV == 1 ]]; then fingerprint "$REQUIREMENTS" "$ROOT/requirements/dev.txt" > "$DEV_STAMP"; fi
rm -f "$INSTALLING"
say "done. Activate it with: source .venv/bin/activate"
