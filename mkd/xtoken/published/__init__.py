"""Losses and file formats of published systems, for comparison with their results.

sorted_l1.py             uld: the L1 distance of sorted probabilities
chunk_distributions.py   a chunk's distribution over a whole vocabulary, which these losses read
hybrid.py                gold and h_kl: a divergence on the common tokens, sorted L1 on the others
projections.py           projection matrices in the published form
dp_kernel.py             the inner loop of the alignment, which numba can compile
align_dp.py              alignment by dynamic programming over token texts
"""
