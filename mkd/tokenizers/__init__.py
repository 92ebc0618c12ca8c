"""Tokenizers behind one interface, and what their tokens are in bytes."""
