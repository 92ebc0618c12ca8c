"""The run that files and flags describe, before processes communicate.

early_checks.py         problems that are found before torch is imported
run_plan.py             models, batch and layouts of a run
model_source.py         the files of one model
preflight.py            problems of tokenizers, data and exports
image_reader.py         the image processors of models
chat_setup.py           the settings of a run for conversations
trained_ends.py         the tokens that end the training texts, for exports
rollout_preflight.py    problems of prompts and stop tokens
"""
