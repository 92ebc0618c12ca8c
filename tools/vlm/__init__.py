"""A small real vision-language model: made, trained, cut, distilled and asked about pictures.

emoji_pictures.py       named pictures in two drawing styles, and conversations about them
small_vlm.py            a SmolVLM folder: layers of SmolLM2, a new vision tower, a connector; and cuts of it
picture_pretraining.py  the tower learns to match pictures with names, then all parts to write the names
vlm_training.py         training and distillation of such folders by pretrain_kd.py
picture_answers.py      answers, likelihoods and KL by plain transformers, also with swapped pictures
"""
