"""Tokenizers behind one interface, and the bytes of their tokens.

tokenizer.py        the interface
load.py             the tokenizer that a flag or a path names
tokenizer_files.py  a folder's tokenizer, as its own files say and not as transformers rebuilds it
kimi.py             Kimi's and Moonlight's rank files
hugging_face.py     tokenizer.json of Hugging Face
sentencepiece.py    .model files of SentencePiece
tiktoken.py         rank files of tiktoken
pieces.py           how vocabularies write bytes
spans.py            the bytes of a text that each of its tokens spells
chat_input.py       conversations as records give them, and the settings of a run that reads them
chat_template.py    a chat template: conversations and calls to text, and the parts that it marks
message_changes.py  messages with one of their texts replaced
chat_turns.py       places of the assistant's turns, found by changing one text, and checked
chat_shapes.py      the same for conversations like one that was searched before
chat.py             conversations to ids and loss masks
"""
