"""The key of records that mkd writes for people and programs, and that no run reads."""

GENERATED = "generated"
"""Notes of `mkd generate` on a completion: its place, length and reward. They are never named as ignored."""
