"""A function that judges completions.

reward_process.py     calls the function, in a process that imports nothing of mkd
reward_calls.py       starts this process, and limits the time of a call
rewards.py            rewards of all completions of a step, and their advantages
"""
