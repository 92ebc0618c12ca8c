"""The families by their Hugging Face `model_type`."""

from __future__ import annotations

from types import MappingProxyType

from mkd.families.deepseek_v3 import DEEPSEEK_V3
from mkd.families.gemma3 import GEMMA3
from mkd.families.gpt_oss import GPT_OSS
from mkd.families.llama import LLAMA
from mkd.families.mistral import MISTRAL
from mkd.families.mixtral import MIXTRAL
from mkd.families.phi3 import PHI3
from mkd.families.qwen2 import QWEN2
from mkd.families.qwen3 import QWEN3
from mkd.families.qwen3_moe import QWEN3_MOE

_ALL = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, GEMMA3, QWEN3_MOE, MIXTRAL),
    DEEPSEEK_V3,  # the rest have layers of their own
    GPT_OSS,
)
FAMILIES = MappingProxyType({one.model_type: one for one in _ALL})
