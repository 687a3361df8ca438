"""The processes of a run: engines, collective operations, launchers and signals."""
