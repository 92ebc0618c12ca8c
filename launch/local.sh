#!/usr/bin/env bash
# Train on this machine, one process per GPU, or on the CPU.
#
#     launch/local.sh --config configs/FILE.yaml [--flag value ...]
#     NPROC=2 launch/local.sh --config configs/quickstart.yaml --tensor-model-parallel-size 2
#
# NPROC is the number of processes (default: one per GPU, 1 without GPUs). The exit code is the one of
# the training.
set -euo pipefail
# shellcheck source=SCRIPTDIR/env.sh
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

if [ -z "${NPROC:-}" ]; then
    NPROC=$(nvidia-smi --list-gpus 2>/dev/null | wc -l) || NPROC=0
    [ "$NPROC" -gt 0 ] || NPROC=1
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export EXIT_CODE_FILE=$scratch/exit_code

# --standalone: a rendezvous on a free port of this machine
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$NPROC" "${TORCHRUN_OPTIONS[@]}" \
    "$ROOT/launch/rank.sh" "$@" &
torchrun=$!
# Forward the first signal to torchrun; Ctrl-C reaches it anyway. Further signals would end torchrun before the processes that
# are saving, or these while they return 75. Each signal interrupts `wait`.
asked=""
for name in TERM HUP QUIT USR1; do
    # shellcheck disable=SC2064  # the current names
    trap "[ -n \"\$asked\" ] || kill -$name $torchrun 2>/dev/null || true; asked=yes" "$name"
done
trap : INT
status=0
until wait "$torchrun"; do
    status=$?
    kill -0 "$torchrun" 2>/dev/null || break
    status=0
done
[ ! -f "$EXIT_CODE_FILE" ] || status=$(cat "$EXIT_CODE_FILE")
exit "$status"
