"""What critics learn when the true return distribution is known."""
