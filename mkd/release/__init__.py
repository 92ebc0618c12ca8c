"""The student after its run: its model card, the Hugging Face hub, other formats.

training_record.py  what a run has left in its log folder: settings, figures, versions
model_licence.py    the licence that a model's folder names
model_card.py       the README.md of an export: its head for the hub, figures, command, what was not checked
card_file.py        the file of a card; one that somebody else wrote or edited is never replaced
hub_push.py         the upload to the hub, and whether it will be allowed
gguf_file.py        the conversion to GGUF, by llama.cpp
"""
