"""Cross-tokenizer distillation: alignment of two tokenizations, vocabulary relation, chunk losses."""

from mkd.xtoken.align.align_chat import align_chat, align_completion
from mkd.xtoken.align.align_text import AlignedText, align, align_spans
from mkd.xtoken.vocabulary.relation_cache import build_projection
