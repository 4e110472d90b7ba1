"""The parts that models are wired from."""
