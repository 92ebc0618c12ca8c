"""The exchange of rows between the processes that share experts: bytes and time of its all-to-all.

A process with t tokens sends each one's hidden state to k experts, and n processes share the experts. If all
experts are chosen equally often, 1/n of the rows stay, and one all-to-all moves out of each process

    t k h e (n - 1) / n    bytes, for hidden size h and e bytes an element.

A forward has two of them (to the experts and back), a backward two. The n processes are neighbours. On one
machine they use the links between its GPUs. On several machines of m GPUs, (m - 1) / n of the rows stay on
the machine and (n - m) / n cross the network. Both move at the same time, so that the slower part counts.
"""

from __future__ import annotations

from mkd.plan.hardware import LINK_BYTES_PER_MS, MACHINE, NETWORK_BYTES_PER_MS


def exchange_ms(rows: int, hidden_size: int, element: int, expert_parallel: int) -> float:
    """Return the milliseconds of one all-to-all of `rows` (tokens x experts of a token).

    It is 0 if one process has all experts.
    """
    each = rows * hidden_size * element / expert_parallel  # to one process
    near = min(expert_parallel, MACHINE) - 1
    far = max(0, expert_parallel - MACHINE)
    return max(near * each / LINK_BYTES_PER_MS, far * each / NETWORK_BYTES_PER_MS)
