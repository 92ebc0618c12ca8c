"""The relation of two vocabularies: which tokens are common, and how each model spells the other's tokens.

spelling.py            tokens in the pieces of the other tokenizer: candidates of chunks, common first tokens
sparse.py, stages.py   the projection matrix of p_kl, stage by stage
relation.py            the whole relation: common tokens, relaxed pairs, projection, spellings
relation_cache.py      relations on disk
slots.py               the order of the teacher's LM-head rows that puts common tokens next to each other
chunk_vocabulary.py    the relation as one tensor-parallel rank's columns
audit.py               shares of a text that two tokenizers can be compared on
"""
