"""Models with images: transformers' vision towers in front of Megatron's decoder.

tower_attention.py  attention of a tower in one call, and its indices without waiting for the host
tower.py            the tower and the projector, which of their parts are trained, MLPs of any width
features.py         features of all images of a row, from the ranks that share it
deepstack.py        decoder layers that take further features
vision_model.py     one part of a model with images
"""
