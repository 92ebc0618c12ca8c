"""Runs whose records have tags, each taught by the teachers of its tag.

route_settings.py                settings
route_setup.py                   teachers that each micro-batch of a run needs
tag_shares.py                    expected shares of tags, and of the forwards of teachers
tagged_records.py                checks, loss card and identity of such a run
"""
