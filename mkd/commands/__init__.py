"""Commands that a user starts, one file each."""
