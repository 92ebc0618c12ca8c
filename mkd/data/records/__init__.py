"""The records of raw files: which keys are read, and the conversations, texts and pairs that they become.

messages.py             conversations checked, and their images separated from their text
given_loss.py           segments and token ids, whose loss the user gives
kinds.py                the kinds of records and their keys
rows.py                 lines and rows of files
parsing.py              a row checked and brought into the form of its kind
written_keys.py         the key that mkd writes for people
ignored_keys.py         counts of what nothing reads
"""
