"""Losses and file formats of published systems, for comparison with their results.

chunk_distributions.py   a chunk's distribution over a whole vocabulary, which these losses read
dense_losses.py          gold and h_kl: a divergence on the common tokens, sorted L1 on others; uld: on all
projections.py           projection matrices in the published form
align_dp.py              alignment by dynamic programming over token texts; numba can compile its inner loop
"""
