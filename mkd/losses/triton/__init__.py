"""The passes over logits as Triton kernels, for GPUs.

triton_divergences.py   the formulas of the divergences
triton_kernels.py       the passes
triton_merge.py         the merge of row statistics
triton_rows.py          launches these kernels, with the functions of torch_rows.py
"""
