"""What a run reports: metrics, tables of rollouts, callbacks."""
