"""Benchmarks of the engine beside other implementations; `tools/benchmark.py` is the command. Nothing imports this package."""
