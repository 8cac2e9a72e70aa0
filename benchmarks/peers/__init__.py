"""Child programs that run in the environment of a peer. They import nothing of this project."""
