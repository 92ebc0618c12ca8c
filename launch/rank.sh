#!/usr/bin/env bash
# Run `mkd train` as one process of torchrun, and leave the exit code of the first failing process in EXIT_CODE_FILE.
# torchrun itself exits 1 after any failure, so that scripts could not tell "preempted, restart me" from a crash.
set -uo pipefail

# torchrun signals the whole process group. Python handles the signal; this shell only waits until Python has ended.
trap : TERM INT HUP QUIT USR1
if [ -f "$ROOT/pretrain_kd.py" ]; then
    "$PYTHON" "$ROOT/pretrain_kd.py" "$@"
else # a copy of these scripts that `mkd launch-scripts` has made
    "$PYTHON" -m mkd train "$@"
fi
code=$?
if [ "$code" -ne 0 ]; then
    # noclobber: a later process does not replace the code of the first one
    (set -C; echo "$code" >"$EXIT_CODE_FILE") 2>/dev/null
fi
exit "$code"
