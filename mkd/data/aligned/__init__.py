"""A corpus as a teacher with a row of its own reads it, and the chunks that tie its tokens to the student's.

aligned_documents.py        records and tokenised documents in the tokens of both models, with their chunks
context_records.py          records whose completion the teacher reads after another prompt
aligned_ids.py              ids without their text, and completions as sampled, in the same way
teacher_store_builder.py    the teacher's corpus written to disk, beside the student's
teacher_store.py            the teacher's corpus on disk, with its chunks
teacher_pieces.py           the teacher's tokens of each piece of a document, and the length of its packs
chunk_selection.py          the chunks of a pack that have loss, and their candidates
teacher_side.py             the teacher's part of every pack: its tokens, its chunks and their candidates
context_summary.py          lines about contexts at the start of a run
teacher_batch.py            the teacher's part of a micro-batch
chunk_shard.py              the part of these chunks that one context-parallel rank owns
"""
