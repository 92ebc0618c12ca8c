#!/usr/bin/env bash
# One training process under torchrun: pretrain_kd.py, with the exit code of the first process that fails left in EXIT_CODE_FILE.
# torchrun itself exits 1 whatever happened, so that scripts could not tell "preempted, start me again" from a crash.
set -uo pipefail

# torchrun signals the whole process group. Python acts on it; this shell only has to stay until Python has ended.
trap : TERM INT HUP QUIT USR1
"$PYTHON" "$ROOT/pretrain_kd.py" "$@"
code=$?
if [ "$code" -ne 0 ]; then
    # noclobber: whoever comes second does not replace what the first one wrote
    (set -C; echo "$code" >"$EXIT_CODE_FILE") 2>/dev/null
fi
exit "$code"
