"""Where things are in the containers of an engine pod. Engine and sidecar see the same paths."""

from __future__ import annotations

SOCKET_DIR = "/run/lmcache"
SOCKET_PATH = f"{SOCKET_DIR}/kvcache.sock"
ARENA_DIR = "/var/lib/lmcache"
ARENA_PATH = f"{ARENA_DIR}/arena"
DISK_DIR = "/var/lib/lmcache-disk"
CONFIG_DIR = "/etc/lmcache/config"
REMOTE_AUTH_DIR = "/etc/lmcache/remote-auth"
AUTHORITY_FILE = "ca.crt"
REMOTE_TLS_DIR = "/etc/lmcache/remote-tls"
REMOTE_DIR = "/etc/lmcache/remote"
SHARDS_FILE = "shards.yaml"
HOME_DIR = "/home/lmcache"
MODELS_DIR = "/models"
HUB_TOKEN_DIR = "/etc/lmcache/hub-token"

PAYLOAD_SOURCE = "/opt/lmcache/payload"
"""In the sidecar's image: the client for the engine, so that both ends always have one version."""
PAYLOAD_DIR = "/opt/lmcache/client"
"""In the engine: its copy, on PYTHONPATH."""
