"""Running on one process, under DDP or with DeepSpeed ZeRO: engines, collectives and preemption signals."""
