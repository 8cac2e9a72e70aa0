"""What only a GPU shows: bandwidth of copies, what they do to an engine's kernels, what pinning costs."""
