"""What ``hier-allreduce bench`` measures: the same gradients through us, every peer, and a plain sum."""
