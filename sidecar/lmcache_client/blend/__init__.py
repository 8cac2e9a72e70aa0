"""The arithmetic of CacheBlend, for every engine and for the library: it needs only torch."""
