"""Parts of generated pages that read the source code."""
