"""Cross-tokenizer distillation: alignment of two tokenizations, vocabulary relation, chunk losses.

align/                   aligned chunks of text, for documents and conversations
vocabulary/              how two vocabularies are related, and where each token's column is
chunks.py                the aligned chunks of a micro-batch as index tensors
loss_settings.py         the losses and their settings
slices.py, segments.py   slices of chunks that fit in memory; sums by index
loss_call.py             the arguments that the losses of a slice share
chunk_torch_passes.py    the passes over logits in plain torch
partition.py, chains.py  partition_kl of 1-1 chunks, and of chunks with several tokens
projected.py             p_kl and prefix_kl
published/               gold, h_kl and uld, and alignment by dynamic programming
teacher_metrics.py       how sure the teacher is of its tokens
fused.py                 LM heads and chunk loss in one, slice by slice, for training
chunk_kernels.py         the passes as GPU kernels
chunk_triton_passes.py   launches these kernels, with the functions of chunk_torch_passes.py
"""

from mkd.xtoken.align.align_chat import align_chat, align_completion
from mkd.xtoken.align.align_text import AlignedText, align, align_spans
from mkd.xtoken.vocabulary.relation_cache import build_projection

__all__ = ["AlignedText", "align", "align_chat", "align_completion", "align_spans", "build_projection"]
