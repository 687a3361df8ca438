"""LoRA: several adapters on one base model, the checks on them, their files on disk, and merging."""
