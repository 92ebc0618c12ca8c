"""Tokenizers behind one interface, and the bytes that their tokens stand for.

tokenizer.py                                      the interface load.py
the tokenizer that a flag or a path names hugging_face.py, sentencepiece.py, tiktoken.py    the three kinds
pieces.py                                         how vocabularies write bytes spans.py
the bytes of a text that each of its tokens stands for chat.py
conversations through a chat template, with the places of the answers
"""
