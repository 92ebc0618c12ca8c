"""What a run reports: the metrics and how they are averaged, where they are written, and the progress line."""
