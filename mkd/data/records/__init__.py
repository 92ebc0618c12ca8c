"""The records of raw files: which keys are read, and the conversations, texts and pairs that they become.

rows.py                 lines and rows of files
kinds.py                the kinds of records and their keys
wanted.py               what the loss of a run reads besides texts
parsing.py              a row checked and brought into the form of its kind
values.py               values of keys: their JSON names, texts that tokenizers accept
conversations.py        the conversations of a record, of a prompt with its completion, of a pair
messages.py             conversations checked, and their images separated from their text
sharegpt.py             messages in ShareGPT's form
content_parts.py        contents that are lists of text and image parts
tool_calls.py           tools, calls of tools, and variables of the chat template
loss_flags.py           flags of messages that say whether they have loss
given_loss.py           segments and token ids, whose loss the user gives
written_keys.py         the key that mkd writes for people
refused_keys.py         keys that would change what a record means
ignored_keys.py         counts of what nothing reads
file_notes.py           notes about a file, from these counts and its first texts
format_hints.py         hints for files of other formats
"""
