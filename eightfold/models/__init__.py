"""Architectures as data and wiring, and the loader."""
