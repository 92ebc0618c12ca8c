"""The settings of a run: one schema behind the command line and the YAML file. Starts without torch."""
