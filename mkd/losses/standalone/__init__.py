"""The loss for other trainers: one module, without Megatron on a process that does not split the vocabulary.

distillation_loss.py  `DistillationLoss`, from hidden states and LM heads, or from logits
language_head.py      `LMHead`: a head's weight, bias, scale and soft-cap, read from a module or a model
vocabulary_split.py   which rows of both heads, or columns of both logits, this process has
dtensors.py           DTensors: their local part, and heads that FSDP2 has sharded
target_rows.py        labels, masks and counts: which rows have a loss
"""
