"""Start the processes of a run, and let them find each other.

local_ranks.py    start the ranks of a command on this machine, without torchrun
child_command.py  commands of mkd one after the other, each in a process
rendezvous.py     all ranks meet before the start; a problem of one ends all
"""
