"""What a run saves: checkpoints to resume from, and final models that `from_pretrained` loads."""
