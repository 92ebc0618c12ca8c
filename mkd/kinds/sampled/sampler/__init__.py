"""Completions from the training model: prompts in, sampled completions out.

rollouts.py           a prompt to complete, its sampled completion, how sampling is configured
sampling.py           the next token of each row, from vocabulary-parallel logits
kv_cache.py           what layers keep of earlier tokens, and the attention that reads keys and values
recurrent_state.py    the recurrence of mixers, which reads and writes states
cached_layers.py      both in the place of a model's own
pipeline_forward.py   a row of tokens through all stages
fixed_rows.py         rows of fixed shapes, as CUDA graphs
lockstep.py           replicas that share experts, row by row together
decoding.py           sequences in slots, run through the training model token by token
"""
