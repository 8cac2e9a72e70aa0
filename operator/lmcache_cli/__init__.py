"""The commands of ``kubectl lmcache``. They read a cluster and change nothing in it."""
