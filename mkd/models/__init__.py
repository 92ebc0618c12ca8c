"""Decoders on Megatron-core: layers for packed documents, and the stage that holds student and teachers.

transformer_config.py            ModelShape -> Megatron's configuration
lora.py                          adapters of linear layers
nf4.py                           frozen weights in 4 bits
fp8_layers.py                    layers that multiply in FP8 in training
layer_parts.py                   RMSNorm, norms behind a block, the gated MLP
rope.py                          rotary embeddings
packed.py, attention.py          document borders, and attention that respects them
attention_check.py               are Transformer Engine's gradients of attention right on this machine?
head_norms.py                    norms over all heads, and behind the rotation
own_heads.py                     attention whose heads differ by layer
xielu.py                         the activation of Apertus
sink_attention.py                attention with sinks, of GPT-OSS
latent_attention.py              multi-head latent attention of DeepSeek-V3
mixers/                          what a layer has in place of attention: gated delta nets, Mamba-2
specs.py                         which module makes which part of a layer
moe/                             the MLP of a layer with experts
graphs/                          the layers of a part as CUDA graphs
language_model.py                one model part: embedding, layers, LM head
whole_rows.py                    the same with context parallelism off, for text that it samples
vision/                          models with images: tower, features, first part
builder.py                       all model parts of a rank
stored_head.py                   the head of a teacher whose hidden states are stored
stage.py                         student and teachers on one pipeline stage; the teachers' time
placed/                          frozen models whose layers are elsewhere, or in FP8
coded/                           experts of frozen models whose weights stay codes of 8 or 4 bits
"""
