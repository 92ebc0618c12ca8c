"""Teachers with another tokenizer than the student.

cross_tokenizer_setup.py   their side of the text and of the vocabulary, before data and models are built
"""
