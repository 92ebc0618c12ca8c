"""Make a student by cutting a teacher: fewer layers, or narrower ones, chosen by measurement.

sizes.py            the target: which shape the student gets, checked without torch
request.py          what is asked for, and its problems that are found before torch is imported
cut.py              a cut: the parts of the teacher that stay, and the student's shape and config.json
probe.py            a model whose layers run one at a time, and scores against the teacher
depth.py            layers: candidates, and the one whose removal hurts least
width.py            channels and attention groups: importance from activations
search.py           every way to reach the sizes, measured without writing it
student_files.py    the student as a Hugging Face folder
student.py          all of it: from a request to the folder and the table
"""
