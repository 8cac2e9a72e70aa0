"""The disk tier: one directory of checksummed files.

``tier`` implements the contract of lower tiers, ``index`` knows the objects and their eviction order,
``files`` reads and writes, and ``file_formats`` has the plain and the encrypted format.
"""
