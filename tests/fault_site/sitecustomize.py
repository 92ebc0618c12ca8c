"""Inject the fault of `MKD_FAULT` into the process.

Python imports this file at its start if the folder is on PYTHONPATH.
"""

import os

from tests import fault_injection

if fault_injection.VARIABLE in os.environ:
    fault_injection.install(os.environ[fault_injection.VARIABLE])
