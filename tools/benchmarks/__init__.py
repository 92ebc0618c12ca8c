"""Benchmarks of mkd and its peers; `tools/benchmark.py` is the command.

Nothing in mkd imports them. In reading order:

cli                    the command line: one subcommand per benchmark
runners                each benchmark's call, with the defaults of this machine
machine                the device under test, and the rates that bound everything on it
measure                time and peak memory of a call
gate                   the check of every arm against float64 before it is timed
peers                  losses of other projects, from their installed source
benchmark_report       table and requirement lines
results                recorded figures: results/*.csv, and the table of docs/performance.md
logits_benchmark       losses on whole logits
head_case              inputs and reference of the fused head
head_benchmark         the loss with the LM heads in it
head_tp_benchmark      the same over several ranks
shapes                 shapes of known models
synthetic_documents    documents as micro-batches
random_engine          the real engine with random weights
step_benchmark         a whole training step
layout_words           words for layouts
layout_benchmark       a step in several layouts, beside the plan
megatron_sft           Megatron's own training step
kernel_times           the time of kernels by kind
host_times             what the CPU does while they run
expert_benchmark       a step with experts, beside Megatron's
stored_states          the reader of stored hidden states
corpus_benchmark       the start of a run on a large corpus
pipeline_benchmark     the pipeline against the bubble formula
decode_benchmark       sampling beside transformers, and its share of a step
trainers               loops of transformers, Liger and TRL
trainers_benchmark     a step beside those of these loops
teacher_gain           what self-teachers with references, and experts by tag, gain
gain_texts             its problems with a checker, code, and the figures of a model on both
gain_report            its tables
overlap                how much of some kernels runs beside others

Studies and benchmarks that were made once are no longer here; docs/performance.md names their commit.
"""
