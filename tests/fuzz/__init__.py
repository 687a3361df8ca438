"""Mutated input of every kind: it is either read correctly or refused in words, and no file is lost."""
