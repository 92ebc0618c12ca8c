"""Processes that share the work: who they are and what they send each other.

axes.py          the axes of the process grid and the process groups that follow from them
context.py       `ParallelContext`: this process's place in the grid, passed down everywhere
start_store.py   the store at which processes meet, also after a restart by torchrun
agreement.py     an error of one rank is raised by all
pipeline.py      what pipeline stages send each other: activations with the teachers' hidden states
state_links.py   hidden states in the pipeline of a teacher that has processes of its own
zigzag.py        which rows of a pack each context-parallel rank holds
image_row.py     the images of a packed row, and how ranks share them
tensor_records.py  a function applied to every tensor of a record
exchange.py      rows of a tensor that the ranks of a group send each other
host_row.py      a whole row of documents in host memory, for a model on other processes
side_groups.py   communication between the sides of a run: the student, and teachers on processes of their own
side_rows.py     which process holds which rows of a state, and what two layouts exchange
side_messages.py messages of a student's replica to a teacher's
side_links.py    the links between both
"""
