"""The report of one or several runs: one HTML file that opens from disk. Only `refresher` imports torch."""
