"""Mixtures of experts on Megatron-core: the MLP of a layer whose tokens are routed.

token_documents.py the document of every token, in the one tensor that reaches the routers
balance.py       balance losses by document, and the load of the experts
router.py        the router with both
experts.py       the experts of one process: a loop of MLPs, or Transformer Engine's grouped products
grouped_product.py products of many experts in one kernel
clamped_gate.py  the gate of GPT-OSS, and biases of grouped experts
squared_relu.py  the activation of grouped experts without gates
layer.py         router, exchange of tokens, experts; which module makes which part
split_layer.py   a decoder layer that runs in three parts: before, in and after its experts
latent.py        experts of projected tokens
"""
