"""What is measured, each with its baseline beside it."""
