"""Checkpoints: Megatron's, of a run, and Hugging Face's, of a model.

distributed.py    what a run saves and loads: `save_checkpoint`, `load_checkpoint`
saving.py         how a save goes, so that the pointer names a whole checkpoint at any time; its tensors: shards.py,
                  each file hashed while the disk takes it: hashed_file.py
verifying.py      which checkpoint a run continues from, compared with its manifest (manifest.py) and searched for code
                  (pickles.py)
folders.py        names, pointer, retention
save_folder.py    size of a checkpoint; one writer a folder
agreement.py      an error of one rank is raised by all
hf_*.py           Hugging Face folders: in (hf_reader.py) and out (hf_writer.py)
"""
