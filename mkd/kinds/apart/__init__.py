"""Teachers on processes of their own, which answer what the student's processes ask.

apart_settings.py  settings
teachers_apart.py  the teachers as a kind of run: checks

The sides are in mkd/plan/sides.py, what connects them in mkd/parallel/side_*.py, the student's end in
mkd/train/remote_states.py, the teacher's in mkd/train/state_server.py and mkd/run/serve_teacher.py.
"""
