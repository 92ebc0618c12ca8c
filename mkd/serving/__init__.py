"""An export in a server: its greedy text and log-probabilities against mkd's.

serve_check.py          the whole check, and its tolerances
served_prompts.py       the texts that both sides continue
server_process.py       a server in a process of its own, with a Python of its own
vllm_program.py          the program of that process, for vLLM
transformers_program.py the same for transformers
"""
