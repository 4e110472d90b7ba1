"""The paged KV cache: the books without torch, and the tensors."""
