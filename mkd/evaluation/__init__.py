"""Held-out evaluation: losses on held-out text, and tasks with right answers.

evaluate.py                      when an evaluation is due; the losses of the held-out set
tasks.py, records.py             tasks: how their files are read, and their metrics
requests.py                      a task as continuations to be scored, packed like training data
scores.py                        log-likelihoods of continuations under every layout
model_comparison.py              two models on one text outside a run, by transformers
harness_model.py                 mkd's model for lm-evaluation-harness
task_evaluator.py                all of it during a run: encoded once, scored at every evaluation
"""
