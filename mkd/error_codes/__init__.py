"""Error codes, for `mkd explain`: one code for each remedy. Torch-free.

code_meanings.py  the meaning of every code, by exit code
former_codes.py   former names of codes
raised_errors.py  the texts that errors have, read from the sources of this mkd
"""
