"""Conversion between Hugging Face folders and Megatron checkpoints, and a comparison with transformers.

conversion_checks.py    problems that are found before torch is imported
models.py               the process grid and the part of the model that a conversion has on each rank
hf_to_mcore.py          a Hugging Face folder to a Megatron checkpoint of iteration 0
mcore_to_hf.py          a Megatron checkpoint to a Hugging Face folder
parity.py               logits of mkd compared with those of transformers
reference_model.py      what parity and mkd compare set in models of transformers
"""
