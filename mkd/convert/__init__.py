"""Hugging Face folders to Megatron checkpoints and back, and a comparison of both with transformers."""
