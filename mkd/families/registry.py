"""The families by their Hugging Face `model_type`."""

from __future__ import annotations

from types import MappingProxyType

from mkd.families.dense.apertus import APERTUS
from mkd.families.dense.ernie4_5 import ERNIE4_5
from mkd.families.dense.exaone4 import EXAONE4
from mkd.families.dense.gemma3 import GEMMA3
from mkd.families.dense.gemma4 import GEMMA4
from mkd.families.dense.granite import GRANITE, GRANITE_HYBRID
from mkd.families.dense.hunyuan_v1_dense import HUNYUAN_V1_DENSE
from mkd.families.dense.llama import LLAMA
from mkd.families.dense.ministral3 import MINISTRAL3
from mkd.families.dense.mistral import MISTRAL
from mkd.families.dense.olmo3 import OLMO3
from mkd.families.dense.phi3 import PHI3
from mkd.families.dense.qwen2 import QWEN2
from mkd.families.dense.qwen3 import QWEN3
from mkd.families.dense.seed_oss import SEED_OSS
from mkd.families.dense.smollm3 import SMOLLM3
from mkd.families.experts.deepseek_v3 import DEEPSEEK_V3, KIMI_K2
from mkd.families.experts.glm4_moe import GLM4_MOE
from mkd.families.experts.glm4_moe_lite import GLM4_MOE_LITE
from mkd.families.experts.gpt_oss import GPT_OSS
from mkd.families.experts.minimax_m2 import MINIMAX_M2
from mkd.families.experts.mixtral import MIXTRAL
from mkd.families.experts.qwen3_moe import QWEN3_MOE, QWEN3_VL_MOE
from mkd.families.hybrid.nemotron_h import NEMOTRON_H
from mkd.families.hybrid.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from mkd.families.hybrid.qwen3_next import QWEN3_NEXT

_ALL = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, GEMMA3, GEMMA4, SEED_OSS, SMOLLM3, MINISTRAL3),
    *(GRANITE, GRANITE_HYBRID, OLMO3, EXAONE4, APERTUS, HUNYUAN_V1_DENSE, ERNIE4_5),
    *(QWEN3_MOE, QWEN3_VL_MOE, MIXTRAL, DEEPSEEK_V3, KIMI_K2, GLM4_MOE, GLM4_MOE_LITE, MINIMAX_M2),
    GPT_OSS,
    *(QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, NEMOTRON_H),
)
FAMILIES = MappingProxyType({one.model_type: one for one in _ALL})
