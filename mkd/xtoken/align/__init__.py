"""Alignment: where the tokens of two models spell the same bytes of one text.

align_text.py   chunks of a text between every two common token boundaries
align_chat.py   chunks of completions, and of the answers of a conversation in each model's chat template
align_view.py   an alignment as text for people
"""
