"""Checkpoints: Megatron's, of a run, and Hugging Face's, of a model.

adapters.py           checkpoints of adapters, and the base that they need
distributed.py        what a run saves and loads: `save_checkpoint`, `load_checkpoint`
finite.py             weights that are NaN or infinite are refused while they are loaded
one_value.py          matrices that nobody has filled are named while they are loaded
optimizer_state.py    the optimizer's part, whichever Adam reads and writes it
main_weights.py       main weights that are not the model's, as earlier versions stored them
averages.py           averages of the student's weights, which teachers have
rounded_runs.py       checkpoints of rounded students, which hold exact weights
saved_tower.py        checkpoints without the tower that a model has, of an earlier mkd
saving.py             the order of a save, in which the pointer always names a complete checkpoint
shards.py             the tensors: which rank writes which, the files and their index
hashed_file.py        a file that is hashed while it is written
manifest.py           size and SHA-256 of every file
verifying.py          the checkpoint to resume from: the newest one that equals its manifest
pickles.py            a search for code in a checkpoint, before anything is unpickled
folders.py            names, pointer, retention, state file
own_exports.py        exports that a run may replace when it resumes
save_folder.py        one writer a folder
hf/                   Hugging Face folders, in and out
"""
