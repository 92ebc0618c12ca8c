"""Corpora: raw files become tokens on disk, once.

sources.py              places of tokenised corpora, and whether a run can read them
documents.py            the documents (ids and loss mask) that each record becomes; preference pairs
encoding.py             encoding of raw files in worker processes, with huge texts cut
store_builder.py        a tokenised corpus written to disk, whole or not at all
store.py                a tokenised corpus on disk, read memory-mapped
cached_corpus.py        the store of raw files in a run's cache folder, found or made
known_files.py          hashes and other facts about files, kept while these stay the same
drafts.py               names of files that are still being written; removal of abandoned ones
"""
