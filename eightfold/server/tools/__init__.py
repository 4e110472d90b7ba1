"""Tool calls: how models write them, how they are read from a stream, and how one is forced."""
