# Environment of every process of a run; sourced by local.sh and slurm.sbatch.
# Each line keeps a value that is already set: `NCCL_DEBUG=INFO launch/local.sh ...` wins.
# shellcheck shell=bash

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export ROOT
# The interpreter: the one that `make` installed, else python3; the first of them that has mkd and what it needs. On a
# machine with GPUs the first that can also import Transformer Engine: in NVIDIA's containers that is python3, unless
# `make SYSTEM_SITE=1` installed.
if [ -z "${PYTHON:-}" ]; then
    pythons=(python3)
    [ -x "$ROOT/.venv/bin/python" ] && pythons=("$ROOT/.venv/bin/python" python3)
    finds_mkd="import sys; from importlib.util import find_spec; sys.exit(None in map(find_spec, ('mkd', 'torch', 'megatron')))"
    able=()
    for python in "${pythons[@]}"; do
        if PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" "$python" -c "$finds_mkd" >/dev/null 2>&1; then
            able+=("$python")
        fi
    done
    PYTHON=${able[0]:-${pythons[0]}} why=""
    if [ "${#able[@]}" -eq 0 ]; then
        why="no Python here has mkd and what it needs: set PYTHON to the one where mkd is installed (mkd doctor)"
    elif command -v nvidia-smi >/dev/null; then
        why="no Python here can import Transformer Engine: attention is slower (docs/containers.md)"
        for python in "${able[@]}"; do
            if "$python" -c "import megatron.core, transformer_engine.pytorch" >/dev/null 2>&1; then
                PYTHON=$python why="it can import Transformer Engine"
                break
            fi
        done
    elif [ "$PYTHON" != "${pythons[0]}" ]; then
        why="${pythons[0]} lacks mkd or what it needs"
    fi
    [ -z "$why" ] || echo "launch/env.sh: PYTHON=$PYTHON, $why" >&2
fi
export PYTHON

# Threads of each process for CPU operators. Too many compete for the cores: use 1 beside a GPU, and cores / processes on
# CPU runs.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Tokenizers start threads, and warn if data workers are forked after that.
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
# Progress lines appear at once, also in files.
export PYTHONUNBUFFERED="${PYTHONUNBUFFERED:-1}"
# A crash in native code prints the Python stack.
export PYTHONFAULTHANDLER="${PYTHONFAULTHANDLER:-1}"

# One hardware queue, so that kernels start in launch order: Megatron overlaps tensor- and sequence-parallel communication
# by launching it before the matrix product. Needed for tensor or context parallelism on Hopper and older. Without either,
# 8 lets more kernels run concurrently. UCC and FSDP need more than 1.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
# Growing segments: packs make tensors of many sizes, which fragment segments of fixed size.
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"

# NCCL prints only warnings. INFO shows rings, transports and interfaces.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
# No NVLink multicast (NVLS): it takes extra memory per communicator, and fails if the fabric manager or the container
# forbids it. 1 makes large all-reduces inside one machine faster where it is known to work.
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"
# On clusters with several networks, NCCL_SOCKET_IFNAME and NCCL_IB_HCA choose one; elsewhere NCCL finds it by itself.

# Keep the last collectives of each process, and write them if one times out (--distributed-timeout-minutes), to show which
# process was missing. torch before 2.9 calls the buffer TORCH_NCCL_TRACE_BUFFER_SIZE.
export TORCH_NCCL_DUMP_ON_TIMEOUT="${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}"
export TORCH_FR_BUFFER_SIZE="${TORCH_FR_BUFFER_SIZE:-2000}"
# An error or timeout of a collective ends the process (3, torch's default) instead of letting it hang.
export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-3}"

# Transformer Engine may use attention kernels whose backward adds in any order; set 0 with --deterministic-mode.
# Leave NVTE_FLASH_ATTN, NVTE_FUSED_ATTN and NVTE_UNFUSED_ATTN unset: Megatron sets them and refuses other values.
export NVTE_ALLOW_NONDETERMINISTIC_ALGO="${NVTE_ALLOW_NONDETERMINISTIC_ALGO:-1}"

# Seconds between a signal that torchrun forwards and SIGKILL; must be longer than a save. torch before 2.12 ignores this
# setting and waits 30.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}"

# Most requeues of a Slurm job. Without a limit, a job whose time is too short for progress would be requeued for ever.
# (A run that crashes is not requeued. If it is restarted and crashes in the same step, the fourth start ends with 76.)
export MAX_RESTARTS="${MAX_RESTARTS:-1000}"

# Options of torchrun, the same on every machine.
# shellcheck disable=SC2034  # read by the scripts that source this file
TORCHRUN_OPTIONS=(
    # Forward these to the training processes. By default SIGUSR1 kills torchrun and orphans them.
    --signals-to-handle "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    # The caller, not torchrun, restarts a failed run from its checkpoint.
    --max-restarts 0
    # rank.sh is a shell script, not Python.
    --no-python
)
