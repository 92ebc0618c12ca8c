"""Completions from a vLLM server that gets the student's weights.

server_client.py      requests to the server
sampling_job.py       completions that it samples in the background
rollout_record.py     these completions on disk
server_probe.py       which weights the server has
server_source.py      all of these as a source of completions
server_setup.py       this source in a run: the server that serves the student, and where records go
"""
