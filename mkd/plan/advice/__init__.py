"""The texts of a plan: forecast, verdict, advice.

forecast_text.py     a forecast as text
own_processes.py     teachers on processes of their own
teacher_place.py     where the teachers' weights can be, and the place to choose
auto_processes.py    the place that --teacher-processes auto takes
verdict.py           whether the run fits its GPUs, and what to change if not
cuda_graphs.py       which models run as CUDA graphs, and what these keep
notes.py             settings without effect, teachers ahead that cost time, a CPU that is the limit
"""
