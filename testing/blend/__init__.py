"""Tests of CacheBlend: a small model that reads across documents, and the effect of blending."""
