"""A cut by other means: the whole teacher in transformers, with the cut parts set to zero."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForCausalLM


@torch.no_grad()
def masked_teacher(folder, cut):
    """Return the teacher without the cut layers, and with zeros for everything else that was cut."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config, body = model.config, model.model
    kinds = getattr(config, "layer_types", None)
    body.layers = nn.ModuleList([body.layers[layer] for layer in cut.layers])
    config.num_hidden_layers = len(cut.layers)
    if kinds:
        config.layer_types = [kinds[layer] for layer in cut.layers]
    for number, layer in enumerate(body.layers):
        if cut.ffn:
            layer.mlp.down_proj.weight[:, removed(config.intermediate_size, cut.ffn[number])] = 0
        if cut.groups:
            mask_groups(layer.self_attn.o_proj, config, cut.groups[number])
    if cut.hidden:
        mask_hidden(model, cut)
    return model


def removed(size, kept):
    return [index for index in range(size) if index not in set(kept)]


def mask_groups(projection, config, kept):
    """Set the inputs of the output projection to zero that the removed key/value heads would give."""
    groups = projection.weight.shape[1] // config.num_key_value_heads
    for group in removed(config.num_key_value_heads, kept):
        projection.weight[:, group * groups : (group + 1) * groups] = 0


def mask_hidden(model, cut):
    """Keep the removed hidden channels at zero, and let the norms divide by the size of the others."""
    size = model.config.hidden_size
    gone, share = removed(size, cut.hidden), len(cut.hidden) / size
    model.model.embed_tokens.weight[:, gone] = 0
    for layer in model.model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight[gone] = 0
            if linear.bias is not None:
                linear.bias[gone] = 0
    norms = {"model.norm.weight": model.model.norm}
    for teacher_layer, layer in zip(cut.layers, model.model.layers, strict=True):
        for name in ("input_layernorm", "post_attention_layernorm"):
            norms[f"model.layers.{teacher_layer}.{name}.weight"] = getattr(layer, name)
    assert norms.keys() == cut.norm_factors.keys()
    for name, norm in norms.items():
        norm.weight.mul_(cut.norm_factors[name] * share**0.5)
        norm.variance_epsilon *= share
