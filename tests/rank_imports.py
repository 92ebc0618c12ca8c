"""Import what CPU ranks need, in the process that `RankPool` forks them from: once, not in every rank."""

from __future__ import annotations

import gc

from mkd.platform import detect

detect()  # before Megatron is imported

import transformers.modeling_utils  # noqa: E402, F401
import transformers.tokenization_utils_tokenizers  # noqa: E402, F401

import mkd.run.loop  # noqa: E402
import mkd.run.main  # noqa: E402
import mkd.run.setup  # noqa: E402, F401

gc.collect()
gc.freeze()  # ranks share these pages for longer
