"""Storage core: arena, memory, disk, remote, tiered. The one place that stores bytes; torch-free."""
