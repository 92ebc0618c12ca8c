"""Cross-tokenizer distillation: alignment of two tokenizations, vocabulary relation, chunk losses."""
