"""Build one HTML file, or a picture, that shows one or several runs.

In reading order:

    run_folder     everything that a run's log folder says
    columns        the records of a run as columns, and as the points of a plot
    findings       before and after, planned and measured, settings that differ
    waiting_sides  which side waits, if teachers have processes of their own
    sample_fields  a sample: its prompt, the texts of models, figures
    page           the page, from assets/report.html.j2
    curves         the picture of curves, by matplotlib
"""
