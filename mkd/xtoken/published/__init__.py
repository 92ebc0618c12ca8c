"""What published cross-tokenizer systems do, for comparison. Loaded only if a run asks for it.

align_dp.py, dp_kernel.py      alignment by dynamic programming (`alignment: dp`)
projections.py                 projection matrices of other engines (`projection: FILE`)
chunk_distributions.py         a chunk's distribution over a whole vocabulary
hybrid.py, sorted_l1.py        the losses gold, h_kl and uld
"""
