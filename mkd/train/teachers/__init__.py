"""Teachers as terms of the loss. Those of other kinds are in mkd/kinds.

base.py                          what every term and every teacher can do
same_tokens.py                   cross entropy, and teachers with the student's tokenizer
chunked.py                       what teachers with a row of their own have in common
routed_terms.py                  terms on the records of one tag
weights.py                       how much each of several teachers counts in a pack
"""
