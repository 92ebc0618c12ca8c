"""What a run needs to survive, apart from what it computes: folders, signals, failures, hangs, restarts.

start.py, folders.py, disk.py    what a run may write, and whether there is room
signals.py, stopping.py          signals and time limits, agreed by all ranks
failures.py, meeting.py          what went wrong on which rank, for all ranks
watchdog.py                      ranks that make no progress
crash_loop.py, markers.py        starts that crash again and again; PREEMPTED and DONE
shared_build.py                  what one rank prepares while the others wait
profiling.py, ending.py          profiles and memory histories; how a run ended
"""
