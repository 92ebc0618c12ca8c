"""The trained tokenizers as fixtures."""

from tests.tokenizers.trained import hf_dir, spm_file, tokenizer  # noqa: F401
