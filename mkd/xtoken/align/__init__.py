"""Alignment: where the tokens of two models stand for the same bytes of one text.

align_text.py    chunks of a text between every two common token boundaries align_chat.py    chunks of the
answers of a conversation, each model in its own chat template, and of completions align_view.py    an
alignment as text for people
"""
