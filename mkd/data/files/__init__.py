"""Files of data: which files a path of a data flag names, and their bytes.

named_files.py      a file, a folder, a pattern or a data set of the hub becomes a list of files
hub_sets.py         data sets of the Hugging Face hub: their files, downloaded or in the hub's cache
hub_layout.py       configurations and splits of a data set, from its README.md and the names of its files
tables.py           tables of records: a class for each format
opened.py           bytes of files that may be compressed, and the size of their text
"""
