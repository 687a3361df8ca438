"""What critics learn where the truth is known."""
