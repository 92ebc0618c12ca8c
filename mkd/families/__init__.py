"""The model families that mkd knows: their config.json, and the tensors that hold their weights.

No torch. In reading order:

    layer_shape.py     what one decoder layer is
    mixer_shape.py     what a layer may have in place of attention
    config_values.py   the kinds of values that config.json may hold
    rope_config.py     rotary position embeddings as config.json spells them
    family.py          what a family must say, and the parts that several families share
    weight_rules.py    rules and tables: which Hugging Face tensors make which parameter
    unread_keys.py     keys of config.json that look as if they had an effect
    dense/             families whose layers have one MLP, one file a family
    experts/           families with experts, one file a family
    hybrid/            families whose layers have attention or a mixer, one file a family
    registry.py        model_type -> family
    vision_shape.py    a vision tower, and what a family with images must say
    vision.py          the families with images
"""
