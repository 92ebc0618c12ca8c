"""The kinds of teachers, each a term of the loss.

base.py                          what every term and every teacher can do
same_tokens.py                   cross entropy, and teachers with the student's tokenizer
cross_tokenizer.py               teachers with another tokenizer
stored.py                        a teacher whose predictions were exported before
weights.py                       how much each of several teachers counts in a pack
"""
