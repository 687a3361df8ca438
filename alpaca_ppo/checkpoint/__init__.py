"""What a run leaves on disk to be resumed from, or loaded by `from_pretrained`."""
