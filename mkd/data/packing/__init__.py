"""Documents to packs: once for a corpus and its settings.

cutting.py         documents cut into pieces that fit into a pack
kept_documents.py  the tokens that are kept of pairs, conversations and other documents
best_fit.py        pieces to packs, best-fit decreasing
array_file.py      arrays in one file: written in parts, whole or not at all, and read memory-mapped
pack_settings.py   settings that decide the packs
pack_index.py      the packs of a data set: in memory if it is small, else from a file that all share
"""
