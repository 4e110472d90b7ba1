"""Grammars for answers: which JSON schemas can be enforced, and the binding to llguidance, which enforces them."""
