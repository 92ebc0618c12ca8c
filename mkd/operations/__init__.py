"""Keep a run alive and explain how it ended, apart from what it computes.

Read in this order:

    run_folders.py    where a run writes, whether it may start there, the markers DONE and PREEMPTED
    disk.py           what a run writes, and whether the disks have room for it
    console.py        the lines that rank 0 prints
    phases.py         what a run is doing, announced to everything that follows it
    event_log.py      what has happened to a run, in LOG/events.jsonl
    signals.py        signals that ask the process to end
    stopping.py       signals and time limits, agreed on by all ranks; what a signal would do now
    launch/           starts the processes of a run, and lets them find each other
    failures.py       which rank failed first, and why
    heartbeat.py      signs of life between the sides of a launch, and the first reason why it ends
    watchdog.py       ranks that make no progress
    crash_loop.py     runs that crash in the same step again and again
    shared_build.py   data that rank 0 prepares while the others wait
    profiling.py      traces, ranges for Nsight Systems, histories of GPU memory
    out_of_memory.py  planned and actual memory of a GPU, and settings that fit
    cleanup.py        actions that run when a run ends, however it ends
"""
