"""Measurements of CacheBlend: a small model that reads across documents, accuracy and time of blending."""
