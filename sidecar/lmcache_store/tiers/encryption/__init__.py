"""Encryption of rows in lower tiers: keys, the format of an encrypted piece, and the cipher.

Only ``aes`` imports the package ``cryptography``. Engines import the tiers without it, because engine images
may lack the package.
"""
