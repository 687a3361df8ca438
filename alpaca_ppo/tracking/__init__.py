"""What a run reports: the metrics log and trackers, tables of rollouts, and callbacks."""
