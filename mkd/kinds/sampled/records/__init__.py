"""Records of agents: text that another process samples with the student's weights, while the run trains.

agent_record.py     one record: its keys, checks, and the rollout that it becomes
record_queue.py     groups of records: which of them a step takes, and which are too old
record_folder.py    files of records as they appear, and the file that tells the writer how far the run is
taken_steps.py      the records that each step took, on disk, so that a resumed run takes them again
record_inbox.py     all of these on rank 0
record_source.py    the records as a source of completions
record_rewards.py   advantages from the rewards in the records
record_stream.py    the batches of a run with records
record_meter.py     scores of the teachers, and the check of ln p
record_setup.py     these in a run
other_programs.py   records from dumps of prime-rl, verl and slime
"""
