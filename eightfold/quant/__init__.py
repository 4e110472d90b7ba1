"""The format, and what is quantized."""
