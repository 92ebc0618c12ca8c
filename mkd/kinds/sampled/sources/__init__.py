"""Where completions come from: the kinds of sources that --rollout-source chooses from.

text_source.py    the hooks of a source
known_sources.py  the sources of `rollout_settings.SOURCES`, and the checks of all
in_process.py     the training model itself
vllm_server.py    a vLLM server; the rest is in server/
agent_records.py  records of agents; the rest is in records/
"""
