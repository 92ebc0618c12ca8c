"""Teachers with another tokenizer than the student.

cross_tokenizers.py        the kind of teacher: checks and loss card
cross_tokenizer_setup.py   its side of the text and of the vocabulary
cross_tokenizer_term.py    the term of the loss

The mathematics are in mkd/xtoken.
"""
