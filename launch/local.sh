#!/usr/bin/env bash
# Train on this machine, one process per GPU, or on the CPU.
#
#     launch/local.sh --config configs/FILE.yaml [--flag value ...]
#     NPROC=2 launch/local.sh --config configs/quickstart.yaml --tensor-model-parallel-size 2
#
# NPROC is the number of processes (default: one per GPU, 1 without GPUs). This is `mkd train --nproc-per-node NPROC` with
# the Python and the environment of env.sh. The exit code is the one of the training, which gets every signal.
set -euo pipefail
# shellcheck source=SCRIPTDIR/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

number=()
[ -z "${NPROC:-}" ] || number=(--nproc-per-node "$NPROC")
if [ -f "$ROOT/pretrain_kd.py" ]; then # a checkout need not be installed
    export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
fi
exec "$PYTHON" -m mkd train ${number[@]+"${number[@]}"} "$@"
