"""Texts that are given as paths and are none: with a variable that a shell would replace, or an address."""

from __future__ import annotations

import os
import re

VARIABLE = re.compile(r"(^|/)\$(\{\w+\}|[A-Za-z_])")
ADDRESS = re.compile(r"[A-Za-z][\w+.-]*://")
HUB_ADDRESS = re.compile(r"https?://(huggingface\.co|hf\.co)/(?P<data>datasets/)?(?P<name>[\w.-]+/[\w.-]+)")


def why_no_path(text: str) -> tuple[str, str] | None:
    """Return (why a text is no path, what to do); None if it may be one."""
    if os.path.exists(text):
        return None
    if VARIABLE.search(text):
        why = "it has a variable, which only a shell replaces, and not between '...'"
        return why, "write the path itself, or give the flag on the command line"
    if not ADDRESS.match(text):
        return None
    on_hub = HUB_ADDRESS.match(text)
    if on_hub is None:
        return (
            "it is an address, and mkd reads and writes files on disks",
            "download it, or mount the storage",
        )
    name = f"hub:{on_hub['name']}" if on_hub["data"] else on_hub["name"]
    return "it is an address, and the Hugging Face hub is read by names", f"name it {name}"
