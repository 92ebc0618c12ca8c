"""The model families that mkd knows: their config.json, and the tensors that hold their weights.

No torch. In reading order:

    layer_shape.py                   what one decoder layer is
    config_values.py                 the kinds of values that config.json may hold
    rope_config.py                   rotary position embeddings as config.json spells them
    family.py                        what a family must say, and the parts that several families share
    weight_rules.py                  rules and tables: which Hugging Face tensors make which parameter
    llama.py, mistral.py, qwen2.py   one file a family
    qwen3.py, phi3.py, gemma3.py
    expert_shapes.py                 experts as several families have them
    qwen3_moe.py, mixtral.py         families with experts
    deepseek_v3.py, gpt_oss.py
    registry.py                      model_type -> family
    vision_shape.py                  a vision tower, and what a family with images must say
    vision.py                        the families with images
"""
