# Environment of every process of a run; sourced by local.sh and slurm.sbatch.
# Each line keeps a value that is already set: `NCCL_DEBUG=INFO launch/local.sh ...` wins.
# shellcheck shell=bash

# The interpreter: the one that `make` installed, else python3.
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export ROOT
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ -x "$ROOT/.venv/bin/python" ] && PYTHON=$ROOT/.venv/bin/python
fi
export PYTHON

# Threads of a process for CPU operators. Too many on one machine compete for its cores. 1 is right beside a
# GPU; on CPU runs set it to cores / processes.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Tokenizers start their own threads, and warn when data workers are forked after that.
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
# Progress lines appear when they are printed, also in files.
export PYTHONUNBUFFERED="${PYTHONUNBUFFERED:-1}"
# A crash in native code prints the Python stack.
export PYTHONFAULTHANDLER="${PYTHONFAULTHANDLER:-1}"

# One hardware queue, so that kernels start in the order in which they were launched. Megatron overlaps
# tensor- and sequence-parallel communication by launching it before the matrix product beside it. Needed for
# tensor or context parallelism on Hopper and older GPUs. Without either, 8 lets more kernels run side by
# side. UCC and FSDP need more than 1.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
# Growing segments instead of new ones. Packs make tensors of many sizes, and fixed segments leave holes
# between them.
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"

# NCCL reports what is wrong, not what it does. INFO shows rings, transports and interfaces.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
# No NVLink multicast (NVLS). It holds extra memory per communicator, and fails if the fabric manager or the
# container does not allow it. If it works, 1 makes large all-reduces inside one machine faster.
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"
# On clusters with several networks NCCL_SOCKET_IFNAME and NCCL_IB_HCA choose one. Elsewhere NCCL finds them
# by itself.

# If a collective times out (--distributed-timeout-minutes), each process writes its last collectives, which
# shows the process that was missing. torch before 2.9 calls the buffer TORCH_NCCL_TRACE_BUFFER_SIZE.
export TORCH_NCCL_DUMP_ON_TIMEOUT="${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}"
export TORCH_FR_BUFFER_SIZE="${TORCH_FR_BUFFER_SIZE:-2000}"
# An error or timeout of a collective ends the process (3, torch's default) instead of leaving it to hang.
export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-3}"

# Transformer Engine may use attention kernels whose backward adds in any order. Set 0 with
# --deterministic-mode. NVTE_FLASH_ATTN, NVTE_FUSED_ATTN and NVTE_UNFUSED_ATTN stay unset: Megatron writes
# them itself and refuses other values.
export NVTE_ALLOW_NONDETERMINISTIC_ALGO="${NVTE_ALLOW_NONDETERMINISTIC_ALGO:-1}"

# Seconds from a signal that torchrun has passed on until SIGKILL: longer than a save takes. torch before 2.12
# lacks this setting and waits 30.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}"

# Number of times that a Slurm job may return to the queue. If a time limit is too short to make progress, the
# job would otherwise return forever. (A run that crashes is not requeued. One that is restarted and crashes
# in the same step ends with 76 the fourth time.)
export MAX_RESTARTS="${MAX_RESTARTS:-1000}"

# Options of torchrun, the same on every machine.
# shellcheck disable=SC2034  # read by the scripts that source this file
TORCHRUN_OPTIONS=(
    # Forward these to the training processes. By default SIGUSR1 kills torchrun and orphans them.
    --signals-to-handle "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    # A failed run is restarted from its checkpoint by whoever started it, not by torchrun.
    --max-restarts 0
    # Start rank.sh as it is: a shell script, not Python.
    --no-python
)
