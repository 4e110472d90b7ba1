"""Schedule, run, postprocess."""
