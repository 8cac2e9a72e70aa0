"""The library's storage backends: thin torch faces over the storage core."""
