"""Imported by Python at its start if this folder is on PYTHONPATH: injects the fault of `MKD_FAULT` into the process."""

import os

from tests import fault_injection

if fault_injection.VARIABLE in os.environ:
    fault_injection.install(os.environ[fault_injection.VARIABLE])
