#!/usr/bin/env bash
# Run one training process under torchrun: pretrain_kd.py. The first process that fails leaves its exit code
# in EXIT_CODE_FILE. torchrun itself always exits with 1, so that scripts could not tell "preempted, start me
# again" from a crash.
set -uo pipefail

# torchrun signals the whole process group. Python acts on it; this shell only has to stay until Python has
# ended.
trap : TERM INT HUP QUIT USR1
"$PYTHON" "$ROOT/pretrain_kd.py" "$@"
code=$?
if [ "$code" -ne 0 ]; then
    # noclobber: a later process does not replace the code of the first one
    (set -C; echo "$code" >"$EXIT_CODE_FILE") 2>/dev/null
fi
exit "$code"
