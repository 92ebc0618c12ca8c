"""Build one HTML file, or a picture, that shows one or several runs.

In reading order:

    run_folder.py     everything that a run's log folder says
    columns.py        the records of a run as columns, and as the points of a plot
    findings.py       before and after, planned and measured, settings that differ
    waiting_sides.py  which side waits, if teachers have processes of their own
    sample_fields.py  a sample: its prompt, the texts of models, figures
    page.py           the page, from assets/report.html.j2
    curves.py         the picture of curves, by matplotlib
"""
