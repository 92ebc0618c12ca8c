"""Families with experts, one file a family.

expert_shapes.py   experts as several families have them
qwen3_moe.py       softmax routing, some layers dense
mixtral.py         experts in every layer
gpt_oss.py         experts with biases and clamped gates, attention sinks
deepseek_v3.py     latent attention, sigmoid routing, shared experts; kimi_k2
glm4_moe.py        DeepSeek-V3's experts behind grouped-query attention
glm4_moe_lite.py   DeepSeek-V3 with named kinds of layers
minimax_m2.py      DeepSeek-V3's routing without groups, one norm of all heads
"""
