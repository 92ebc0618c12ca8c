"""Completions that the student samples itself.

rollout_settings.py   settings
rollout_limits.py     what they refuse
rollout_batch.py      the composition of a step
rollout_metrics.py    metrics
own_text.py           all of these as a kind of run
stop_ids.py           the tokens that end a completion
sampler/              completions from the training model
sources/              the sources of completions that --rollout-source chooses from
server/               completions from a vLLM server that gets the student's weights
records/              text of agents, written by another process
reward/               a function that judges completions
rollout_teachers.py   completions as each teacher reads them: other prompts, other tokenizers
made_contexts.py      teachers' prompts with siblings and feedback
rollout_packs.py      completions as packs for training
rollout_figures.py    length, truncation, repetition and entropy of a step's completions
rollout_stream.py     the batches of a run: stored packs and fresh completions
rollout_meter.py      scores of the teachers for them, on the last stage
rollout_preflight.py  problems of prompts and stop tokens, before processes meet
rollouts_setup.py     stream and meter of a run
"""
