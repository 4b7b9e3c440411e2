#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains a diffusion model by FlowGRPO.
#
#   scripts/pretrain_flowgrpo.sh                               the quick start: a tiny model, here, in some minutes
#   scripts/pretrain_flowgrpo.sh --train-iters 5               the quick start with another setting
#   scripts/pretrain_flowgrpo.sh --model FOLDER --train-prompts FILE ...    your model: its flags are all yours
#   scripts/pretrain_flowgrpo.sh --config FILE.yaml ...        the same from a file (configs/recipes/)
#   scripts/pretrain_flowgrpo.sh --help                        all flags
#
# Processes, by torchrun's usual variables: NPROC_PER_NODE (default 1; the quick start takes 2 on a CPU), NNODES,
# NODE_RANK, MASTER_ADDR, MASTER_PORT. On several machines start it on each one with the same values and its own
# NODE_RANK. The first run on a machine makes .venv (scripts/setup.sh); OMNI_PYTHON names an interpreter to use
# instead. The quick start runs in the repository's folder, everything else in the folder it is called from.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${OMNI_PYTHON:-$ROOT/.venv/bin/python}"
NNODES="${NNODES:-1}"

# Makes .venv on a new machine; says so in no time when it is there.
if [[ -z "${OMNI_PYTHON:-}" ]]; then
    "$ROOT/scripts/setup.sh"
elif ! command -v "$PYTHON" > /dev/null; then
    echo "pretrain_flowgrpo: OMNI_PYTHON=$OMNI_PYTHON: no such program (without it scripts/setup.sh makes .venv)" >&2
    exit 1
fi
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

# To keep settings of your own in a script, copy this file and fill these in. What stands here wins over the files of
# --config; what is given when the script is called wins over all. docs/flags.md describes every flag.
MODEL_ARGS=(      # --model /data/Qwen-Image --height 512 --width 512 --bf16 --recompute-granularity full
)
PARALLEL_ARGS=(   # --tensor-model-parallel-size 4 --sequence-parallel --use-distributed-optimizer
)
ROLLOUT_ARGS=(    # --prompts-per-step 32 --samples-per-prompt 16 --sde-window-size 2 --sde-window-range 0 5
)
ALGORITHM_ARGS=(  # --clip-range 1e-5 --updates-per-rollout 2 --kl-coef 0
)
OPTIMIZER_ARGS=(  # --lr 3e-5 --clip-grad 1.0 --micro-batch-size 4
)
REWARD_ARGS=(     # --reward ocr --reward-weights 1.0
)
DATA_ARGS=(       # --train-prompts train.txt --eval-prompts held_out.txt
)
LOGGING_ARGS=(    # --run-name my_run --save-interval 50
)
ARGS=("${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${ALGORITHM_ARGS[@]}" "${OPTIMIZER_ARGS[@]}"
    "${REWARD_ARGS[@]}" "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@")

QUICK_START=1
for argument in "${ARGS[@]}"; do
    case "$argument" in
        -h | --help) exec "$PYTHON" -m omni_engine.pretrain_flowgrpo --help ;;
        --model | --model=* | --config | --config=*) QUICK_START=0 ;;
    esac
done
# Two data-parallel processes of one thread use two cores better than one process of two threads.
has_device() { command -v nvidia-smi > /dev/null || command -v npu-smi > /dev/null; }
cores() { env -u OMP_NUM_THREADS nproc; } # nproc would take that variable for the number of cores
if [[ $QUICK_START == 1 && "$(cores)" -ge 2 ]] && ! has_device; then
    NPROC_PER_NODE="${NPROC_PER_NODE:-2}"
fi
NPROC_PER_NODE="${NPROC_PER_NODE:-1}"
if [[ $QUICK_START == 1 ]]; then
    cd "$ROOT"
    ARGS=(--config configs/recipes/quick_start.yaml "${ARGS[@]}")
fi

# Refused settings are told here, once, rather than by every process among torchrun's own messages.
WORLD_SIZE=$((NNODES * NPROC_PER_NODE)) "$PYTHON" -m omni_engine.arguments "${ARGS[@]}" || exit $?

if [[ "$NNODES" == 1 && -z "${MASTER_PORT:-}" ]]; then
    DISTRIBUTED_ARGS=(--standalone) # picks a free port
else
    DISTRIBUTED_ARGS=(--nnodes "$NNODES" --node-rank "${NODE_RANK:-0}" --master-addr "${MASTER_ADDR:-localhost}"
        --master-port "${MASTER_PORT:-29500}")
fi
# torchrun of the same interpreter, with a plain last word
exec "$PYTHON" -m omni_engine.launch --nproc-per-node "$NPROC_PER_NODE" "${DISTRIBUTED_ARGS[@]}" \
    -m omni_engine.pretrain_flowgrpo "${ARGS[@]}"
