"""Texts by a student and its teacher, outside a run: `mkd chat` and `mkd sample`.

In reading order:

    named_model.py       the model that a command line names: folder, hub id, checkpoint or run
    generation.py        settings of completions
    writer.py            a loaded model that completes prompts with the sampler of rollouts
    text_stream.py       ids to text, token by token
    answer.py            an answer that is being written
    interruption.py      Ctrl-C, agreed by all ranks
    views.py             answers on a terminal or in a pipe: one after the other, or in two columns
    wrapped_text.py      lines of a column
    dialogue.py          a conversation with one or two models
    sampled_prompts.py   completions of prompts, as JSON lines or readable
"""
