"""The student's own text: prompts in, sampled completions out, packed for training.

In reading order:
  rollouts     a prompt to complete, its sampled completion, how sampling is configured
  sampling     the next token of each row, from vocabulary-parallel logits
  kv_cache     the keys and values of earlier tokens, and the attention that reads them
  decoding     sequences in slots, run through the training model token by token
  stop_ids     the tokens that end a completion
  reward_process     calls a reward function, in a process that imports nothing of mkd
  reward_calls       starts this process, and limits the time of a call
  rewards            rewards of all completions of a step, and their advantages
  rollout_packs      completions as packs for training
  rollout_figures    length, truncation, repetition and entropy of a step's completions
  rollout_stream     the batches of a run: stored packs and fresh completions
"""
